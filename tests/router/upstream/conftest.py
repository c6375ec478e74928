"""Fixtures of the relay's tests: they choose the event loop and the implementation of the relay."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvloop

from tests.certs import Authority
from tests.router.loops import PLAIN, Loops, relay_loops
from tests.router.relay_support import BOTH_PATHS, use_implementation
from tests.router.upstream.over_tls import Sides, sides_of, tls_everywhere

# A worker that never reads gets no request over TLS, for it answers no handshake.
NOT_OVER_TLS = ("test_a_worker_that_stops_reading_the_request_exceeds_the_send_timeout",)


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Loops:
    """Run `test_relay_*.py` on uvloop, as the router does, and at full length also on asyncio's
    loop; run other tests on asyncio's loop.
    """
    return relay_loops() if item.path.name.startswith("test_relay") else PLAIN


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return sides_of(Authority(tmp_path_factory.mktemp("certificates")))


@pytest.fixture(params=[*BOTH_PATHS, pytest.param("tls", marks=pytest.mark.live)])
async def every_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with both implementations of the relay, then with the Python one over TLS on
    both sides (live).
    """
    if request.param != "tls":
        use_implementation(request.param, monkeypatch)
        return
    if request.node.originalname in NOT_OVER_TLS:
        pytest.skip("there is no such failure over TLS")
    on_own_loop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    if inspect.iscoroutinefunction(request.function) and not on_own_loop:
        pytest.skip("TLS is tried on the router's own loop only")
    tls_everywhere(request.getfixturevalue("sides"), monkeypatch)

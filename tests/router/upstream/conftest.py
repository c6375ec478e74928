"""The relay's tests: which event loops they run on, and which way their bytes go."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvloop

from tests.certs import Authority
from tests.router.loops import PLAIN, Loops, relay_loops
from tests.router.relay_support import BOTH_PATHS, go_by
from tests.router.upstream.over_tls import Sides, sides_of, tls_everywhere

# A worker that never reads gets no request over TLS, for it answers no handshake.
NOT_OVER_TLS = ("test_a_worker_that_stops_taking_the_request_is_late_in_that_phase",)


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Loops:
    """uvloop for `test_relay_*.py`, as in the router, at full length asyncio's, too; else that."""
    return relay_loops() if item.path.name.startswith("test_relay") else PLAIN


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return sides_of(Authority(tmp_path_factory.mktemp("certificates")))


@pytest.fixture(params=[*BOTH_PATHS, pytest.param("tls", marks=pytest.mark.live)])
async def every_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both paths, then that in Python with TLS on either side (live)."""
    if request.param != "tls":
        go_by(request.param, monkeypatch)
        return
    if request.node.originalname in NOT_OVER_TLS:
        pytest.skip("there is no such failure over TLS")
    on_own_loop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    if inspect.iscoroutinefunction(request.function) and not on_own_loop:
        pytest.skip("TLS is tried on the router's own loop only")
    tls_everywhere(request.getfixturevalue("sides"), monkeypatch)

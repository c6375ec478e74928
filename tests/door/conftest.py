"""Which event loops the door's tests run on, and who answers in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.door import support
from tests.router.conftest import relay_loops


@pytest.fixture(params=[pytest.param("aiohttp", marks=pytest.mark.live), "auto"])
def both_fronts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every request goes to the server behind, then as many as can be are the door's own."""
    monkeypatch.setattr(support, "FRONT", request.param)
    return str(request.param)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The router's loop; at full length asyncio's, too, where there is no TLS."""
    if item.path.name == "test_relay_over_tls.py":
        return {"uvloop": uvloop.new_event_loop}
    return relay_loops()

"""The door on both event loops: asyncio's, and uvloop, which the router runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.door import support


@pytest.fixture(params=["aiohttp", "auto"])
def both_fronts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every request goes to the server behind, then as many as can be are the door's own."""
    monkeypatch.setattr(support, "FRONT", request.param)
    return str(request.param)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The relay's tests run on both without TLS; with it, on that of the router."""
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if item.path.name == "test_relay_over_tls.py":
        del loops["asyncio"]
    return loops

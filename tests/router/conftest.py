"""The relay's tests run on both event loops it may meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from router.http.relay.native import NativeRelay
from tests.router import relay_support


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both loops for `test_relay_*.py`, the default elsewhere."""
    if item.path.name.startswith("test_relay"):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(params=["python", "native"])
def both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every relay that a test makes goes the Python way, then by the thread."""
    if request.param == "native" and not NativeRelay.usable():
        pytest.skip("the native relay was not built: no compiler, or no Linux")
    monkeypatch.setattr(relay_support, "PATH", request.param)
    return str(request.param)

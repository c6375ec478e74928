"""The relay's tests: which event loops they run on, and which way their bytes go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from router.upstream.native import NativeRelay
from tests.effort import QUICK
from tests.router.upstream import relay_support


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop for `test_relay_*.py`, as in the router, at full length asyncio's, too; else that."""
    if not item.path.name.startswith("test_relay"):
        return {"asyncio": asyncio.new_event_loop}
    return relay_loops()


def relay_loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loops of tests that relay."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    return loops if QUICK else loops | {"asyncio": asyncio.new_event_loop}


@pytest.fixture(params=[pytest.param("python", marks=pytest.mark.live), "native"])
def both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every relay that a test makes goes the Python way (live), then by the thread."""
    if request.param == "native" and not NativeRelay.usable():
        pytest.skip("the native relay was not built: no compiler, or no Linux")
    monkeypatch.setattr(relay_support, "PATH", request.param)
    return str(request.param)

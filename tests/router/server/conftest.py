"""Runs the server's tests on the router's own event loop, at full length also on asyncio's."""

from __future__ import annotations

import pytest

from tests.router.loops import Loops, relay_loops


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Loops:
    return relay_loops()

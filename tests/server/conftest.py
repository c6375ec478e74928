"""Which event loops the server's tests run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.router.conftest import relay_loops


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The router's loop; at full length asyncio's, too, where there is no TLS."""
    if item.path.name == "test_relay_over_tls.py":
        return {"uvloop": uvloop.new_event_loop}
    return relay_loops()

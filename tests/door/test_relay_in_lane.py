"""The relay's own tests once more, with requests that the door serves without a server behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.door.support import LIMITS, behind
from tests.router import relay_support, test_relay_client
from tests.router.conftest import both_paths
from tests.router.relay_support import Handler
from tests.router.test_relay_client import *  # noqa: F403
from tests.router.test_relay_failures import *  # noqa: F403
from tests.router.test_relay_replies import *  # noqa: F403
from tests.router.test_relay_slow_client import *  # noqa: F403

__all__ = ["both_paths"]

del test_aiohttp_calls_only_what_the_reply_relies_on  # noqa: F821 - of the server behind


@asynccontextmanager
async def through_the_door(handle: Handler) -> AsyncIterator[int]:
    async with behind(handle, replace(LIMITS, body_bytes=1 << 26), front="auto") as it:
        yield it.port


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests listen with is a door that serves their requests itself."""
    monkeypatch.setattr(relay_support, "served", through_the_door)
    monkeypatch.setattr(test_relay_client, "served", through_the_door)

"""The stack of programs that quick tests share: they ask it, and leave it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.live.stack import Stack, running

BODY_LIMIT = 1 << 20


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A router in front of three timed workers; idle again at the end."""
    # Workers that misbehave join it, and are not to be ejected before a test has seen them do so.
    router = ["--limits-body-bytes", str(BODY_LIMIT), "--ejection-failures", "1000"]
    async with running(tmp_path_factory.mktemp("logs"), workers=3, router=router) as stack:
        yield stack
        await stack.assert_idle()

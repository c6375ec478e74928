"""The router and workers that quick tests share; each test must leave them as it found them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.live.stack import Stack, running

BODY_LIMIT = 1 << 20


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Yield a router with three simulated workers; check at the end that no request is in
    flight.
    """
    # Tests add workers that misbehave; these must not be ejected before the test has seen them.
    router = ["--limits-body-bytes", str(BODY_LIMIT), "--ejection-failures", "1000"]
    async with running(tmp_path_factory.mktemp("logs"), workers=3, router=router) as stack:
        yield stack
        await stack.assert_idle()

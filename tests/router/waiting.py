"""Helpers that wait in tests for a condition, without a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 10.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds; fails with `what` after the deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {DEADLINE_S:g} s for {what}"
        await asyncio.sleep(0.005)

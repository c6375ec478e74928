"""Runs the real router with an event loop that stops for 20 ms in every 200.

A slow policy's decision, a large batch of events or a garbage collection would have this effect.
The program takes the arguments of `python -m router`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from router.cli import serve as serving
from router.cli.main import main

STALL_S, EVERY_S = 0.020, 0.200
GENUINE = serving.serve


async def _stalled(*arguments: Any) -> None:
    loop = asyncio.get_running_loop()

    def stall() -> None:
        until_s = time.monotonic() + STALL_S
        while time.monotonic() < until_s:
            pass  # this holds the loop, and also Python's lock
        loop.call_later(EVERY_S - STALL_S, stall)

    loop.call_later(EVERY_S, stall)
    await GENUINE(*arguments)


if __name__ == "__main__":
    serving.serve = _stalled  # type: ignore[assignment] # whatever its arguments
    sys.exit(main())

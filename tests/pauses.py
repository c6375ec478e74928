"""Measures times on machines that may stop for seconds; such a time is measured again."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

TICK_S = 0.05
PAUSE_S = 0.3  # longer than a busy core delays a thread
TRIES = 4
Measured = TypeVar("Measured")


class Ticks:
    """A thread that wakes every `TICK_S` inside a `with` block and records how late it woke."""

    def __init__(self) -> None:
        self.longest_s = 0.0  # longest time between two of its turns
        self.paused_s = 0.0  # sum of the gaps of `PAUSE_S` or more
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def _tick(self) -> None:
        last_s = time.monotonic()
        over = False
        while not over:
            over = self._over.wait(TICK_S)
            now_s = time.monotonic()
            gap_s, last_s = now_s - last_s, now_s
            self.longest_s = max(self.longest_s, gap_s)
            self.paused_s += gap_s if gap_s >= PAUSE_S else 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


async def measured(
    measure: Callable[[], Awaitable[Measured]], fits: Callable[[Measured], bool]
) -> Measured:
    """Return the result of `measure`, measured again if it does not fit and the machine paused
    meanwhile.
    """
    for tried in range(1, TRIES + 1):
        with Ticks() as ticks:
            found = await measure()
        if fits(found) or ticks.longest_s < PAUSE_S or tried == TRIES:
            break
        print(f"{found} was measured while the machine paused for {ticks.longest_s:.1f} s")
    return found


async def running_s(act: Awaitable[object]) -> float:
    """Return the seconds that `act` took, without those in which the machine stood still."""
    began_s = time.monotonic()
    with Ticks() as ticks:
        await act
    return time.monotonic() - began_s - ticks.paused_s

"""Events that one router alone can have, where several routers share what they know.

Whoever is elected opens the feed and reads; all others are told what it read (`router.replicas`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from router.events.claim import Claim
from router.events.telling import FeedContext, FeedCounters

if TYPE_CHECKING:
    from router.events.feed import Feed


class ElectedFeed:
    """Lifetime: worker. `run` ends when cancelled."""

    def __init__(
        self, opened: Callable[[FeedContext], Feed], claim: Claim, context: FeedContext
    ) -> None:
        """`opened` gives a feed that was never run: one for each time that we read."""
        self._opened, self._claim = opened, claim
        # What peers know, they know from here: nothing is to be had of them.
        self._context = replace(context, tell=claim.tell, keeps_payloads=True, borrow=None)
        self._feed: Feed | None = None
        self._past = FeedCounters()  # of the feeds before
        self._changed = asyncio.Event()

    @property
    def counters(self) -> FeedCounters:
        """What happened so far."""
        return self._past if self._feed is None else _sum(self._past, self._feed.counters)

    @property
    def source(self) -> str:
        """Where its events come from, for people."""
        return self._claim.source

    def resync(self, from_seq: int) -> None:
        """Ask for what was missed, by whoever reads."""
        if self._claim.missing() and self._feed is not None:
            self._feed.resync(from_seq)

    async def run(self) -> None:
        """Read whenever it is our turn, until cancelled. Raises what the feed's `run` raises."""
        self._claim.open(self._changed.set)
        try:
            while True:
                self._changed.clear()
                if self._claim.reads:
                    await self._read()
                else:
                    await self._changed.wait()
        finally:
            self._claim.close()

    async def _read(self) -> None:
        self._feed = self._opened(self._context)
        reading = asyncio.create_task(self._feed.run())
        try:
            while self._claim.reads and not reading.done():
                self._changed.clear()
                waiting = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._past, self._feed = self.counters, None
        if not reading.cancelled():
            reading.result()


def _sum(one: FeedCounters, other: FeedCounters) -> FeedCounters:
    total = FeedCounters(lag_s=other.lag_s)
    for field in fields(total):
        if field.name != "lag_s":
            setattr(total, field.name, getattr(one, field.name) + getattr(other, field.name))
    return total

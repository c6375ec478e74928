"""A worker's event feed for any engine, read by this router or by an elected replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Protocol

from router.events.delivery import Claim, FeedContext, FeedCounters
from router.events.sources import EventSource, PollSource
from router.events.trtllm import PolledFeed
from router.events.zmq_feed import ZmqFeed


class ElectedFeed:
    """A feed of a worker's KV events that reads only while the routers that share their state elect
    this router to read. `run` ends when it is cancelled. Lifetime: worker.
    """

    def __init__(
        self, opened: Callable[[FeedContext], Feed], claim: Claim, context: FeedContext
    ) -> None:
        """Make a feed that does not read yet. `opened` makes a new feed each time that this router
        begins to read.
        """
        self._opened, self._claim = opened, claim
        # Peers know these events only from here, so they cannot be asked.
        self._context = replace(
            context, report_fact=claim.report_fact, keeps_payloads=True, borrow=None
        )
        self._feed: Feed | None = None
        self._past = FeedCounters()  # of the feeds before
        self._changed = asyncio.Event()

    @property
    def counters(self) -> FeedCounters:
        """The counters of this worker's KV events so far."""
        return self._past if self._feed is None else _sum(self._past, self._feed.counters)

    @property
    def source(self) -> str:
        """A text for people that says where the worker's events come from."""
        return self._claim.source

    def resync(self, from_seq: int) -> None:
        """Request the events missed from batch `from_seq` on. The request goes to the engine, or to
        the router that reads the engine's events.
        """
        if self._claim.missing() and self._feed is not None:
            self._feed.resync(from_seq)

    async def run(self) -> None:
        """Read the events whenever this router is elected to, until cancelled. Raises any error
        that the `run` of the inner feed raises.
        """
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
    total = FeedCounters(lag_s=other.lag_s, heard=other.heard)
    for field in fields(total):
        if field.name not in ("lag_s", "heard"):
            setattr(total, field.name, getattr(one, field.name) + getattr(other, field.name))
    return total


class Feed(Protocol):
    """Reads one worker's stream of KV events for the core. Lifetime: worker."""

    @property
    def counters(self) -> FeedCounters:
        """The counters of this worker's KV events so far."""

    def resync(self, from_seq: int) -> None:
        """Request the events missed from batch `from_seq` on. The fact `ReplayEnd` ends
        the answer.
        """

    async def run(self) -> None:
        """Read the worker's events until cancelled."""


def open_feed(source: EventSource, worker_id: int, model: str, context: FeedContext) -> Feed:
    """Return the feed for this source of events. `model` is the name of the base model, from which
    the seeds of block hashes are made. If only one router can read the source, the routers that
    share it elect the one that reads.
    """

    def opened(context: FeedContext) -> Feed:
        if isinstance(source, PollSource):
            return PolledFeed(source, worker_id, model, context)
        return ZmqFeed(source, worker_id, model, context)

    if not source.exclusive or context.claim is None:
        return opened(context)
    return ElectedFeed(opened, context.claim(worker_id, source.address), context)

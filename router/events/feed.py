"""A worker's event feed, whatever its engine: opened by where its events are to be had."""

from __future__ import annotations

from typing import Protocol

from router.events.elected import ElectedFeed
from router.events.polling import PolledFeed
from router.events.source import EventSource, PollSource
from router.events.telling import FeedContext, FeedCounters
from router.events.zmq_feed import ZmqFeed


class Feed(Protocol):
    """One worker's event stream, followed for the core. Lifetime: worker."""

    @property
    def counters(self) -> FeedCounters:
        """What happened so far."""
        ...

    def resync(self, from_seq: int) -> None:
        """Ask for what was missed from `from_seq` on; a `ReplayEnd` is the answer's end."""
        ...

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        ...


def open_feed(source: EventSource, worker_id: int, model: str, context: FeedContext) -> Feed:
    """The feed for such a source. `model` names the base model of the chain seeds.

    One that a single router can have is read by whom the routers that share it elect.
    """

    def opened(context: FeedContext) -> Feed:
        if isinstance(source, PollSource):
            return PolledFeed(source, worker_id, model, context)
        return ZmqFeed(source, worker_id, model, context)

    if not source.exclusive or context.claim is None:
        return opened(context)
    return ElectedFeed(opened, context.claim(worker_id, source.address), context)

"""What all feeds share: batches told to the core, counters, complaints, turns of the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from engine.wire import WireError
from kvkernels import EventBatch
from policies.facts import KvEvents, ReplayEnd
from router.core.wire_events import WireEvents
from router.events.claim import Claim
from router.events.hub import Hubs
from router.lines import worth_a_line

log = logging.getLogger(__name__)

_TURN_S = 0.005  # of batches that wait already, before others get a turn of the event loop
_LARGE_BYTES = 256 << 10  # of a payload: decoded beside the event loop


# Of a worker, with the number of its latest live batch: whether a peer told all that it holds.
Borrow = Callable[[int, Callable[[], int]], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class FeedContext:
    """What the feeds of all workers are given. Lifetime: feed; `hubs` and sockets: process."""

    http: aiohttp.ClientSession
    zmq: zmq.asyncio.Context
    clock: Callable[[], float]
    tell: Callable[[KvEvents | ReplayEnd], None]  # a fact for the core
    hubs: Hubs
    timeout_s: float  # for one answer: a snapshot's begin, a replayed batch
    backlog_batches: int  # that may wait in front of a feed
    # ZMQ does not say when a subscription has reached the publisher: what it published between
    # our first question and then is asked for once more, when that must be over.
    subscribed_s: float = 1.0
    first_seq: int = 0  # number of the first batch to ask for
    wants_snapshot: Callable[[], bool] = lambda: False  # whether the core lacks what a replay tells
    # For a worker's events at an address that one router alone can have; None: it is alone.
    claim: Callable[[int, str], Claim] | None = None
    borrow: Borrow | None = None  # for what an engine cannot tell; None: there are no peers
    keeps_payloads: bool = False  # facts have live batches also as they came
    wall: Callable[[], float] = time.time  # seconds since the epoch, as batches are stamped


@dataclass(slots=True)
class FeedCounters:
    """Lifetime: worker. Counts only ever grow."""

    malformed_frames: int = 0
    skipped_events: int = 0
    replays: int = 0
    snapshots: int = 0
    failed_syncs: int = 0  # neither a replay nor a snapshot could be had
    failed_polls: int = 0
    dropped_frames: int = 0  # that waited in front of this feed, beyond its backlog
    # Not a count: how old the latest live batch was when it came, by its publisher's stamp.
    lag_s: float | None = None


class Teller:
    """One worker's batches on their way to the core. Lifetime: worker."""

    def __init__(self, worker_id: int, model: str, context: FeedContext) -> None:
        self.worker_id = worker_id
        self.model = model
        self.counters = FeedCounters()
        self.next_seq = 0  # after the last batch told
        self.live_seq = -1  # of the last live batch
        self._tell = context.tell
        self._clock = context.clock
        self._wall = context.wall
        self._keeps_payloads = context.keeps_payloads

    async def batch(
        self, seq: int, payload: bytes, source: Literal["live", "replay"], digest: int | None = None
    ) -> None:
        """Tell a batch of wire events. Raises WireError where it is none.

        `digest` is by default the payload's; 0 where equal payloads say nothing of its publisher.
        """
        if len(payload) > _LARGE_BYTES:
            batch = await asyncio.to_thread(decoded, payload)
        else:
            batch = decoded(payload)
        if source == "live" and batch.ts_s and math.isfinite(batch.ts_s):
            self.counters.lag_s = self._wall() - batch.ts_s
        self.counters.skipped_events += batch.skipped
        self.next_seq = seq + 1
        if source == "live":
            self.live_seq = seq
        if digest is None:
            digest = xxh3_64_intdigest(payload)
        kept = payload if self._keeps_payloads and source == "live" else None
        events = WireEvents(batch, self.model, len(payload), kept)
        self._tell(KvEvents(self._clock(), self.worker_id, seq, events, source, digest))

    def snapshot(self, seq: int, batches: Sequence[EventBatch], heard_seq: int) -> None:
        """Tell the worker's whole cache as of `seq`.

        `heard_seq`: the last batch that had been told when it was asked for. The publisher of that
        one cannot have a cache as of an earlier batch: this is another one's.
        """
        if seq < heard_seq:
            self.began_anew()
        self.counters.snapshots += 1
        self.counters.skipped_events += sum(batch.skipped for batch in batches)
        self.next_seq = seq + 1
        events = WireEvents(batches, self.model)
        self._tell(KvEvents(self._clock(), self.worker_id, seq, events, "snapshot"))

    def replay_end(self, answered: bool) -> None:
        """Tell that no more of what was missed will come."""
        self._tell(ReplayEnd(self._clock(), self.worker_id, answered))

    def began_anew(self) -> None:
        """Tell that the publisher has nothing left of what was heard of it."""
        log.info("worker %d: its publisher lacks what it had published before", self.worker_id)
        self._tell(ReplayEnd(self._clock(), self.worker_id, answered=True, began_anew=True))

    def unheard(self, endpoint: str, waited_s: float) -> None:
        """Say that nobody publishes there: no later batch would show that one is missing."""
        line = "worker %d: no publisher at %s after %g s: its KV events are not heard"
        log.warning(line, self.worker_id, endpoint, waited_s)

    def malformed(self, error: WireError) -> None:
        """Count a message that cannot be read."""
        self.counters.malformed_frames += 1
        total = self.counters.malformed_frames
        if worth_a_line(total):  # a broken publisher must not fill the log
            log.warning("worker %d: %d malformed event frames: %s", self.worker_id, total, error)

    def failed_poll(self, error: Exception) -> None:
        """Count a question that was not answered."""
        self.counters.failed_polls += 1
        total = self.counters.failed_polls
        if worth_a_line(total):
            log.warning("worker %d: %d polls for events failed: %r", self.worker_id, total, error)

    def failed_sync(self, why: str) -> None:
        """Count what was missed and could not be had again."""
        self.counters.failed_syncs += 1
        total = self.counters.failed_syncs
        if worth_a_line(total):
            line = "worker %d: missed events are not to be had: %s (%d so far)"
            log.warning(line, self.worker_id, why, total)

    def dropped(self) -> None:
        """Count a message for which there was no room in front of this feed."""
        self.counters.dropped_frames += 1
        total = self.counters.dropped_frames
        if worth_a_line(total):
            log.warning(
                "worker %d: %d event frames dropped, its backlog is full", self.worker_id, total
            )


class Turn:
    """Gives others a turn of the event loop while messages wait without end.

    Receiving a message that is there already does not wait, so a flood of events would keep
    the loop to itself. Lifetime: one loop of a feed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()

    async def over(self) -> None:
        """Called between two messages."""
        if self._clock() - self._began_s >= _TURN_S:
            await asyncio.sleep(0)
            self._began_s = self._clock()


def decoded(payload: bytes) -> EventBatch:
    """The batch in a payload, all of it or nothing. Raises WireError."""
    try:
        return EventBatch(payload)
    except ValueError as error:
        raise WireError(str(error)) from error

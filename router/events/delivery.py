"""The common parts of all feeds: delivery of batches to the core, counters, shared readers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import aiohttp
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from engine.wire.events import WireError
from kvkernels import EventBatch
from policies.facts import KvEvents, KvHeard, ReplayEnd
from router.core.workers.kv_events import WireEvents
from router.record.logs import worth_a_line

FeedFact = KvEvents | ReplayEnd | KvHeard


class Claim(Protocol):
    """The claim of this router to read a worker's KV events, if several routers share the events.
    Only one of them reads the events and passes them to the others.
    """

    @property
    def reads(self) -> bool:
        """True if this router should read the events now."""

    @property
    def source(self) -> str:
        """A text for people that says where the events come from."""

    def open(self, on_change: Callable[[], None]) -> None:
        """Begin the claim. `on_change` is called whenever `reads` has changed. Raises ValueError if
        another feed of this router reads the worker's events.
        """

    def close(self) -> None:
        """End the claim, because this router no longer wants the events."""

    def report_fact(self, fact: FeedFact) -> None:
        """Pass a fact that this router has read to its own core and to all other routers."""

    def missing(self) -> bool:
        """Handle a gap in the events. Return whether the reader in this router should request the
        missing events.
        """


log = logging.getLogger(__name__)

Key = str | int
Message = Any  # what the reader of that address gives; feed and reader are of one file


class ReaderQueue:
    """The queue of messages that wait for one feed. Lifetime: feed."""

    def __init__(self, limit: int, dropped: Callable[[], None]) -> None:
        self._queue: asyncio.Queue[Message] = asyncio.Queue(limit)
        self._dropped = dropped
        self.connected: Callable[[bool], None] = lambda up: None
        self._end: BaseException | None = None
        self._taken = False  # the last message was received and is still being processed

    async def receive(self) -> Message:
        """Return the next message. If the reader has ended, raise the error that ended it."""
        if self._taken:
            self._queue.task_done()
        self._taken = False
        message = await self._queue.get()
        self._taken = True
        if self._end is not None:
            raise self._end
        return message

    def give(self, message: Message) -> None:
        """Queue a message for the feed. A message beyond the limit is dropped and counted."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._dropped()

    async def wait_until_processed(self) -> None:
        """Wait until the feed has processed all queued messages."""
        await self._queue.join()

    def end(self, error: BaseException) -> None:
        """Let `receive` raise this error, because the reader has ended."""
        self._end = error
        with suppress(asyncio.QueueFull):  # a full queue wakes its feed as well
            self._queue.put_nowait(None)


class SharedReader:
    """Passes the messages that arrive at one address to the feeds of several workers, by a queue
    for each feed. Lifetime: as long as a feed reads from the address.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.queues: dict[Key, ReaderQueue] = {}
        self.strays = 0  # messages for which there is no queue
        self.finishing = False  # no further poll may begin
        self.polling = asyncio.Lock()  # held by a poll while it waits for an answer
        self.reader: asyncio.Task[None] | None = None

    def give(self, key: Key, message: Message) -> None:
        """Queue a message for the feed `key`; if there is no such feed, count the message."""
        queue = self.queues.get(key)
        if queue is not None:
            queue.give(message)
            return
        self.strays += 1
        if worth_a_line(self.strays):
            log.warning(
                "%s: %d messages with events that no worker is to have, now of %.100r",
                self.address,
                self.strays,
                key,
            )

    def give_all(self, message: Message) -> None:
        """Add a message to the queue of every feed."""
        for queue in self.queues.values():
            queue.give(message)

    def connected(self, up: bool) -> None:
        """Tell every feed that a publisher connected or was lost, because the reader does not know
        which worker the publisher belongs to.
        """
        for queue in self.queues.values():
            queue.connected(up)

    async def finish(self) -> None:
        """Begin no more polls, and wait until the feeds have processed all answers."""
        self.finishing = True
        async with self.polling:
            await asyncio.gather(*(queue.wait_until_processed() for queue in self.queues.values()))

    def end(self, reader: asyncio.Task[None]) -> None:
        """End every feed, because the reader has ended, which is a defect of the router."""
        error = None if reader.cancelled() else reader.exception()
        for queue in self.queues.values():
            queue.end(error or RuntimeError(f"nobody reads {self.address} any more"))


Reader = Callable[[SharedReader], Coroutine[Any, Any, None]]


class SharedReaders:
    """Holds all shared readers, by the addresses that they read. Lifetime: process."""

    def __init__(self) -> None:
        self._open: dict[str, SharedReader] = {}

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def joined(
        self, address: str, key: Key, limit: int, dropped: Callable[[], None], read: Reader
    ) -> AsyncIterator[ReaderQueue]:
        """Yield a queue for the messages with the key `key` that arrive at `address`. The first
        queue at an address starts `read`, which reads from the address. At most `limit` messages
        wait in the queue. Raises ValueError if another feed has the queue for this key.
        """
        shared = self._open.get(address)
        if shared is None or shared.reader is None or shared.reader.done():
            shared = self._open[address] = SharedReader(address)
            shared.reader = asyncio.create_task(read(shared))
            shared.reader.add_done_callback(shared.end)
        if key in shared.queues:
            raise ValueError(f"two workers take the events of {key!r} at {address}")
        queue = shared.queues[key] = ReaderQueue(limit, dropped)
        try:
            yield queue
        finally:
            del shared.queues[key]
            if not shared.queues:
                await self._close(shared)

    async def finish(self, timeout_s: float) -> None:
        """Begin no more polls, and wait until all running polls are answered and their events are
        processed. If the router stopped before an answer arrived, the events in the answer would be
        lost to all routers.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(shared.finish() for shared in self._open.values()))

    async def _close(self, shared: SharedReader) -> None:
        if self._open.get(shared.address) is shared:
            del self._open[shared.address]
        assert shared.reader is not None
        shared.reader.cancel()
        await asyncio.gather(shared.reader, return_exceptions=True)


_SLICE_S = 0.005  # of processing waiting batches, before other tasks get the event loop
_LARGE_BYTES = 256 << 10  # of a payload: larger ones are decoded in a thread
_MAX_MEDIA = 8  # unknown ones of a worker that are named


# Called with a worker and a function that returns the number of its latest live batch; returns
# whether a peer passed on its whole copy.
Borrow = Callable[[int, Callable[[], int]], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class FeedContext:
    """The parameters that the feeds of all workers have in common. Lifetime: feed; `readers` and
    the sockets live as long as the process.
    """

    http: aiohttp.ClientSession
    zmq: zmq.asyncio.Context
    clock: Callable[[], float]
    report_fact: Callable[[FeedFact], None]  # a fact for the core
    readers: SharedReaders
    timeout_s: float  # for one answer: a snapshot's begin, a replayed batch
    backlog_batches: int  # that may wait in front of a feed
    # ZMQ does not say when a subscription has reached the publisher: what it published between
    # our first question and then is asked for once more, when that must be over.
    subscribed_s: float = 1.0
    first_seq: int = 0  # number of the first batch to ask for
    wants_snapshot: Callable[[], bool] = lambda: False  # whether the core lacks what a replay tells
    # For a worker's events at an address that one router alone can have; None: it is alone.
    claim: Callable[[int, str], Claim] | None = None
    # For events that an engine cannot replay; None: there are no peers.
    borrow: Borrow | None = None
    keeps_payloads: bool = False  # facts have live batches also as they came
    wall: Callable[[], float] = time.time  # seconds since the epoch, as batches are stamped
    worker_name: str = ""  # the worker's URL, for logs


@dataclass(slots=True)
class FeedCounters:
    """Counts what one worker's feed received and could not use. The counts only grow. Lifetime:
    worker.
    """

    malformed_frames: int = 0
    skips: Counter[str] = field(default_factory=Counter)  # events that cannot be used, by why
    unknown_media: Counter[str] = field(default_factory=Counter)  # of those, by the medium's name
    replays: int = 0
    snapshots: int = 0
    failed_syncs: int = 0  # neither a replay nor a snapshot could be had
    failed_polls: int = 0
    dropped_frames: int = 0  # that waited in front of this feed, beyond its backlog
    disconnects: int = 0  # connections to a publisher that were lost
    other_windows: int = 0  # events of attention windows that are not the largest
    # No counts: how old the latest live batch was when it came, by its publisher's stamp; and
    # whether what is published reaches us, with nothing left to ask for since it did not.
    lag_s: float | None = None
    heard: bool = True

    @property
    def skipped_events(self) -> int:
        """The number of events that the router could not use."""
        return self.skips.total()


class Delivery:
    """Passes one worker's batches of events to the core. Lifetime: worker."""

    def __init__(self, worker_id: int, model: str, context: FeedContext) -> None:
        self.worker_id = worker_id
        self.label = f"worker {worker_id} ({context.worker_name})"
        self.model = model
        self.counters = FeedCounters()
        self.next_seq = 0  # the number after the last batch passed on
        self.live_seq = -1  # of the last live batch
        self._report_fact = context.report_fact
        self._clock = context.clock
        self._wall = context.wall
        self._keeps_payloads = context.keeps_payloads
        self._connected = True  # also if it was never connected: then there is nothing to lose

    async def batch(
        self, seq: int, payload: bytes, source: Literal["live", "replay"], digest: int | None = None
    ) -> None:
        """Pass a batch of events, as it came from the worker, to the core. `digest` is the hash of
        the payload. If it is None, it is computed; 0 means that equal payloads do not prove the
        same publisher. Raises WireError if the batch is malformed.
        """
        if len(payload) > _LARGE_BYTES:
            batch = await asyncio.to_thread(decoded, payload)
        else:
            batch = decoded(payload)
        if source == "live" and batch.ts_s and math.isfinite(batch.ts_s):
            self.counters.lag_s = self._wall() - batch.ts_s
        if batch.skipped:
            self._skipped_in(batch)
        self.next_seq = seq + 1
        if source == "live":
            self.live_seq = seq
        if digest is None:
            digest = xxh3_64_intdigest(payload)
        kept = payload if self._keeps_payloads and source == "live" else None
        events = WireEvents(batch, self.model, len(payload), kept)
        self._report_fact(KvEvents(self._clock(), self.worker_id, seq, events, source, digest))
        self._report_no_events()  # it may have waited here since before the connection was lost

    def unreadable(self, seq: int, payload: bytes, error: WireError) -> None:
        """Tell the core that a replayed batch cannot be read, and would be unreadable in any other
        replay, too.
        """
        self.malformed(error)
        self.next_seq = seq + 1
        now_s, digest = self._clock(), xxh3_64_intdigest(payload)
        self._report_fact(
            KvEvents(now_s, self.worker_id, seq, (), "replay", digest, unreadable=True)
        )
        self._report_no_events()

    def snapshot(self, seq: int, batches: Sequence[EventBatch], heard_seq: int) -> None:
        """Pass the worker's whole cache as of batch `seq` to the core.

        `heard_seq` is the last batch received before the snapshot was requested. Its publisher
        cannot return a cache as of an earlier batch, so an earlier `seq` shows that the publisher
        was replaced.
        """
        if seq < heard_seq:
            self.on_publisher_replaced()
        self.counters.snapshots += 1
        for batch in batches:
            if batch.skipped:
                self._skipped_in(batch)
        self.next_seq = seq + 1
        events = WireEvents(batches, self.model)
        self.counters.heard |= self._connected
        self._report_fact(KvEvents(self._clock(), self.worker_id, seq, events, "snapshot"))
        self._report_no_events()

    def replay_end(self, answered: bool) -> None:
        """Tell the core that the replay has ended, so that no more missed batches follow."""
        self.counters.heard |= self._connected
        self._report_fact(ReplayEnd(self._clock(), self.worker_id, answered))
        self._report_no_events()

    def on_publisher_replaced(self) -> None:
        """Tell the core that the publisher of the events was replaced, so that its former batches
        no longer count.
        """
        log.info("%s: its publisher lacks what it had published before", self.label)
        self._report_fact(ReplayEnd(self._clock(), self.worker_id, answered=True, began_anew=True))

    def disconnected(self, endpoint: str) -> None:
        """Tell the core that the connection for live batches is lost. The known state of the cache
        does not change until all missed batches have arrived.
        """
        self._connected = self.counters.heard = False
        self.counters.disconnects += 1
        total = self.counters.disconnects
        if worth_a_line(total):
            line = "%s: the connection to its KV events at %s is lost (%d so far)"
            log.warning(line, self.label, endpoint, total)
        self._report_no_events()

    def reconnected(self, asked: bool) -> None:
        """Note that the connection is back, or that another engine connected to an endpoint that
        the router binds. `asked` is True if the missed batches were requested; then a replay brings
        them. Otherwise the missed batches are lost.
        """
        was_lost, self._connected = not self._connected, True
        self.counters.heard |= not asked
        if was_lost and not asked:
            self._report_fact(KvHeard(self._clock(), self.worker_id, heard=False, severed=True))

    def _report_no_events(self) -> None:
        if not self.counters.heard:
            self._report_fact(KvHeard(self._clock(), self.worker_id, heard=False))

    def on_no_publisher(self, endpoint: str, waited_s: float) -> None:
        """Log that the router finds no publisher at this endpoint. Without this line nobody would
        notice, because a gap in the events shows only when a later batch arrives.
        """
        line = "%s: no publisher at %s after %g s: its KV events are not heard"
        log.warning(line, self.label, endpoint, waited_s)

    def skipped(self, skips: Mapping[str, int]) -> None:
        """Count unusable events by reason. The other events of the same batches are used."""
        before = self.counters.skipped_events
        self.counters.skips.update(skips)
        total = self.counters.skipped_events
        if before.bit_length() < total.bit_length():  # the 1st, 2nd, 4th ...
            line = "%s: %d of its KV events cannot be used and are left out: %s"
            whys = ", ".join(f"{count} {why}" for why, count in self.counters.skips.most_common())
            log.warning(line, self.label, total, whys)

    def _skipped_in(self, batch: EventBatch) -> None:
        self.skipped(batch.skips())
        known = self.counters.unknown_media
        for medium, count in batch.unknown_media().items():
            if medium not in known and medium and len(known) < _MAX_MEDIA:
                line = "%s: its KV events tell of an unknown medium, %r: left out"
                log.warning(line, self.label, medium)
            known[medium if medium in known or len(known) < _MAX_MEDIA else ""] += count

    def malformed(self, error: WireError) -> None:
        """Count a message that cannot be read."""
        self.counters.malformed_frames += 1
        total = self.counters.malformed_frames
        if worth_a_line(total):  # a broken publisher must not fill the log
            log.warning("%s: %d malformed event frames: %s", self.label, total, error)

    def failed_poll(self, error: Exception) -> None:
        """Count a poll that was not answered."""
        self.counters.failed_polls += 1
        total = self.counters.failed_polls
        if worth_a_line(total):
            log.warning("%s: %d polls for events failed: %r", self.label, total, error)

    def failed_sync(self, why: str) -> None:
        """Count a request for missed events that failed."""
        self.counters.failed_syncs += 1
        total = self.counters.failed_syncs
        if worth_a_line(total):
            line = "%s: missed events are not to be had: %s (%d so far)"
            log.warning(line, self.label, why, total)

    def dropped(self) -> None:
        """Count a message for which this feed's queue had no room."""
        self.counters.dropped_frames += 1
        total = self.counters.dropped_frames
        if worth_a_line(total):
            log.warning("%s: %d event frames dropped, its backlog is full", self.label, total)


class LoopYield:
    """Lets other tasks of the event loop run now and then while a feed reads an endless stream of
    messages. To receive a message that has already arrived does not give way to other tasks, so a
    flood of events would block the event loop. Lifetime: one loop of a feed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()

    async def over(self) -> None:
        """Let other tasks run if this task has run for long. The feed calls this method between two
        messages.
        """
        if self._clock() - self._began_s >= _SLICE_S:
            await asyncio.sleep(0)
            self._began_s = self._clock()


def decoded(payload: bytes) -> EventBatch:
    """Return the batch in a payload. Raises WireError if any part of it is malformed."""
    try:
        return EventBatch(payload)
    except ValueError as error:
        raise WireError(str(error)) from error


async def read_bounded(reply: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the whole body of an answer. Raises WireError if it has more than `limit` bytes."""
    body = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > limit:
            raise WireError(f"{reply.method} {reply.url}: an answer of more than {limit} bytes")
    return bytes(body)

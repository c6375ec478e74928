"""One worker's KV event stream: subscribe, notice what is missing, ask for it again.

Live batches come by ZMQ SUB. At the start, and whenever the core finds a gap, the missing ones
are asked for: a snapshot for a late joiner where the worker has one, else a replay. The core
keeps what arrives meanwhile and puts everything in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import aiohttp
import zmq
import zmq.asyncio

from engine.wire import (
    Batch,
    WireError,
    decode_batch,
    decode_snapshot,
    parse_live,
    parse_replay,
    replay_request,
)
from engine.wire.events import MAX_PAYLOAD_BYTES
from engine.wire.snapshot import MAX_SNAPSHOT_BYTES
from policies.facts import KvEvent, KvEvents, ReplayEnd
from router.events.translate import facts_of

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 1.0  # between two tries at a worker that answers neither replay nor snapshot
_BETWEEN_SYNCS_S = 0.1  # a worker whose stream has gap after gap must not be asked without end
_REPLAY_MAX_S = 30.0  # for a whole replay, however long its batches keep coming
# ZMQ does not say when a subscription has reached the publisher: what it published between our
# first question and then is asked for once more, when that must be over.
_SUBSCRIBED_S = 1.0
_TURN_S = 0.005  # of batches that wait already, before others get a turn of the event loop


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where a worker's events are to be had. URLs as ZMQ and HTTP take them."""

    live: str
    replay: str | None = None
    snapshot: str | None = None  # our engine's own
    topic: str = ""


@dataclass(slots=True)
class FeedCounters:
    """Lifetime: worker. Only ever grow."""

    malformed_frames: int = 0
    skipped_events: int = 0
    replays: int = 0
    snapshots: int = 0
    failed_syncs: int = 0  # neither a replay nor a snapshot could be had


class EventFeed:
    """Lifetime: worker. `tell` hands a fact to the core; `run` ends when cancelled."""

    def __init__(
        self,
        worker_id: int,
        model: str,
        source: EventSource,
        tell: Callable[[KvEvents | ReplayEnd], None],
        clock: Callable[[], float],
        http: aiohttp.ClientSession,
        zmq_context: zmq.asyncio.Context,
        timeout_s: float,
        backlog_batches: int,
        subscribed_s: float = _SUBSCRIBED_S,
    ) -> None:
        self.counters = FeedCounters()
        self._worker_id = worker_id
        self._model = model
        self._source = source
        self._tell = tell
        self._clock = clock
        self._http = http
        self._zmq = zmq_context
        self._timeout_s = timeout_s
        self._backlog_batches = backlog_batches
        self._subscribed_s = subscribed_s
        self._next_seq = 0  # after the last batch told
        self._wanted: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

    def resync(self, from_seq: int) -> None:
        """Ask for what was missed from `from_seq` on. While one request runs, no second one."""
        if not self._wanted.full():
            self._wanted.put_nowait(from_seq)

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        sub = self._socket(zmq.SUB)
        try:
            sub.setsockopt(zmq.RCVHWM, self._backlog_batches)
            sub.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            sub.connect(self._source.live)
            self.resync(0)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(sub))
                tasks.create_task(self._answer_resyncs())
                tasks.create_task(self._look_again())
        finally:
            sub.close(linger=0)

    async def _listen(self, sub: zmq.asyncio.Socket) -> None:
        turn = _Turn(self._clock)
        while True:
            frames = await sub.recv_multipart()
            await turn.over()
            try:
                live = parse_live(frames)
                batch = decode_batch(live.payload)
            except WireError as error:
                self._malformed(error)
                continue
            self._tell_batch(live.seq, batch, "live")

    async def _look_again(self) -> None:
        """Ask once for what was published before the subscription took hold."""
        await asyncio.sleep(self._subscribed_s)
        self.resync(self._next_seq)

    async def _answer_resyncs(self) -> None:
        while True:
            from_seq = await self._wanted.get()
            answered = await self._sync(from_seq)
            if not answered:
                self.counters.failed_syncs += 1
            if self._wanted.empty():  # else the next one speaks for the gap that is open now
                self._tell(ReplayEnd(self._clock(), self._worker_id, answered))
            await asyncio.sleep(_BETWEEN_SYNCS_S if answered else _ASK_AGAIN_S)
            if not answered and self._source.snapshot is not None:
                self.resync(0)  # its whole cache mends what no replay can

    async def _sync(self, from_seq: int) -> bool:
        """Whether somebody answered."""
        if from_seq == 0 and await self._snapshot():
            return True
        if await self._replay(from_seq):
            return True
        return from_seq != 0 and await self._snapshot()

    async def _snapshot(self) -> bool:
        if self._source.snapshot is None:
            return False
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s * 5)
            async with self._http.get(
                self._source.snapshot, timeout=timeout, allow_redirects=False
            ) as reply:
                if reply.status != 200:
                    raise WireError(f"GET {self._source.snapshot} answered {reply.status}")
                body = await _read_bounded(reply, MAX_SNAPSHOT_BYTES)
            # In a thread: 2 million tokens take 0.1 s to decode.
            seq, facts, skipped = await asyncio.to_thread(_facts_of_snapshot, body, self._model)
        except (aiohttp.ClientError, TimeoutError, WireError) as error:
            log.info("worker %d: no snapshot: %s", self._worker_id, error)
            return False
        self.counters.snapshots += 1
        self.counters.skipped_events += skipped
        self._next_seq = seq + 1
        self._tell(KvEvents(self._clock(), self._worker_id, seq, facts, "snapshot"))
        return True

    async def _replay(self, from_seq: int) -> bool:
        if self._source.replay is None:
            return False
        dealer = self._socket(zmq.DEALER)
        try:
            dealer.connect(self._source.replay)
            async with asyncio.timeout(_REPLAY_MAX_S):
                await self._read_replay(dealer, from_seq)
            self.counters.replays += 1
            return True
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            if isinstance(error, WireError):
                self._malformed(error)
            log.info("worker %d: replay from %d failed: %r", self._worker_id, from_seq, error)
            return False
        finally:
            dealer.close(linger=0)

    async def _read_replay(self, dealer: zmq.asyncio.Socket, from_seq: int) -> None:
        """Tell the core what is replayed, to its end. Raises TimeoutError or WireError."""
        turn = _Turn(self._clock)
        await dealer.send_multipart(replay_request(from_seq))
        while True:
            async with asyncio.timeout(self._timeout_s):
                frames = await dealer.recv_multipart()
            await turn.over()
            live = parse_replay(frames)
            if live is None:
                return
            self._tell_batch(live.seq, decode_batch(live.payload), "replay")

    def _tell_batch(self, seq: int, batch: Batch, source: Literal["live", "replay"]) -> None:
        facts, skipped = facts_of(batch.events, self._model)
        self.counters.skipped_events += skipped + batch.skipped
        self._next_seq = seq + 1
        self._tell(KvEvents(self._clock(), self._worker_id, seq, facts, source))

    def _malformed(self, error: WireError) -> None:
        self.counters.malformed_frames += 1
        if self.counters.malformed_frames & (self.counters.malformed_frames - 1) == 0:
            # At 1, 2, 4, 8, ...: a broken publisher must not fill the log.
            total = self.counters.malformed_frames
            log.warning("worker %d: %d malformed event frames: %s", self._worker_id, total, error)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._zmq.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES + 1024)
        return socket


class _Turn:
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


def _facts_of_snapshot(body: bytes, model: str) -> tuple[int, tuple[KvEvent, ...], int]:
    """(seq, facts, events skipped) of a snapshot. Raises WireError."""
    snapshot = decode_snapshot(body)
    if not -1 <= snapshot.seq < 1 << 63:
        raise WireError(f"snapshot as of batch {snapshot.seq}")
    events = tuple(event for batch in snapshot.batches for event in batch.events)
    facts, skipped = facts_of(events, model)
    return snapshot.seq, facts, skipped + sum(batch.skipped for batch in snapshot.batches)


async def _read_bounded(reply: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > limit:
            raise WireError(f"snapshot of more than {limit} bytes")
    return bytes(body)

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
from policies.facts import KvEvents, ReplayEnd
from router.events.translate import facts_of

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 1.0  # between two tries at a worker that answers neither replay nor snapshot


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
    failed_syncs: int = 0


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
        finally:
            sub.close(linger=0)

    async def _listen(self, sub: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sub.recv_multipart()
            try:
                live = parse_live(frames)
                batch = decode_batch(live.payload)
            except WireError as error:
                self._malformed(error)
                continue
            self._tell_batch(live.seq, batch, "live")

    async def _answer_resyncs(self) -> None:
        while True:
            from_seq = await self._wanted.get()
            answered = await self._sync(from_seq)
            if not answered:
                self.counters.failed_syncs += 1
            self._tell(ReplayEnd(self._clock(), self._worker_id, answered))
            if not answered:
                await asyncio.sleep(_ASK_AGAIN_S)

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
            async with self._http.get(self._source.snapshot, timeout=timeout) as reply:
                reply.raise_for_status()
                body = await _read_bounded(reply, MAX_SNAPSHOT_BYTES)
            snapshot = decode_snapshot(body)
        except (aiohttp.ClientError, TimeoutError, WireError) as error:
            log.info("worker %d: no snapshot: %s", self._worker_id, error)
            return False
        self.counters.snapshots += 1
        events = tuple(event for batch in snapshot.batches for event in batch.events)
        facts, skipped = facts_of(events, self._model)
        self.counters.skipped_events += skipped
        self._tell(KvEvents(self._clock(), self._worker_id, snapshot.seq, facts, "snapshot"))
        return True

    async def _replay(self, from_seq: int) -> bool:
        if self._source.replay is None:
            return False
        dealer = self._socket(zmq.DEALER)
        try:
            dealer.connect(self._source.replay)
            await dealer.send_multipart(replay_request(from_seq))
            while True:
                async with asyncio.timeout(self._timeout_s):
                    frames = await dealer.recv_multipart()
                live = parse_replay(frames)
                if live is None:
                    self.counters.replays += 1
                    return True
                self._tell_batch(live.seq, decode_batch(live.payload), "replay")
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            if isinstance(error, WireError):
                self._malformed(error)
            log.info("worker %d: replay from %d failed: %r", self._worker_id, from_seq, error)
            return False
        finally:
            dealer.close(linger=0)

    def _tell_batch(self, seq: int, batch: Batch, source: Literal["live", "replay"]) -> None:
        facts, skipped = facts_of(batch.events, self._model)
        self.counters.skipped_events += skipped + batch.skipped
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


async def _read_bounded(reply: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > limit:
            raise WireError(f"snapshot of more than {limit} bytes")
    return bytes(body)

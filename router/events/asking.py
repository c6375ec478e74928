"""One publisher asked for what it has: its snapshot by HTTP, a replay by ZMQ."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import zmq
import zmq.asyncio

from engine.wire import WireError, parse_replay, replay_request
from engine.wire.snapshot import MAX_SNAPSHOT_BYTES, snapshot_payloads
from kvkernels import EventBatch
from router.events.answers import read_bounded
from router.events.sockets import opened
from router.events.source import ZmqSource
from router.events.telling import FeedContext, Teller, Turn, decoded

log = logging.getLogger(__name__)

_REPLAY_BATCHES = 20_000  # that may wait for us: twice what vLLM keeps
_REPLAY_MAX_S = 30.0  # for a whole replay, however long its batches keep coming


@dataclass(slots=True)
class Replayed:
    """A replay that was answered. Lifetime: answer."""

    first_seq: int | None = None  # of its batches
    last_seq: int = -1
    leaps: bool = False  # batches are missing in it that it lacked when asked for them alone


class Asked(Protocol):
    """One publisher. What it answers is told to the core at once."""

    @property
    def has_snapshot(self) -> bool:
        """Whether it can tell its whole cache."""
        ...

    @property
    def has_replay(self) -> bool:
        """Whether it can tell batches once more."""
        ...

    @property
    def where(self) -> str | None:
        """The address that is asked, for people."""
        ...

    async def snapshot(self) -> bool:
        """Whether it told its whole cache."""
        ...

    async def replay(self, from_seq: int) -> Replayed | None:
        """Its batches from `from_seq` on, those it kept; None where it did not answer."""
        ...


class AskedByZmq:
    """The publisher of a `ZmqSource`. Lifetime: feed."""

    def __init__(self, source: ZmqSource, teller: Teller, context: FeedContext) -> None:
        self._source = source
        self._teller = teller
        self._context = context

    @property
    def has_snapshot(self) -> bool:
        """Whether it can tell its whole cache."""
        return self._source.snapshot is not None

    @property
    def has_replay(self) -> bool:
        """Whether it can tell batches once more."""
        return self._source.replay is not None

    @property
    def where(self) -> str | None:
        """The address that is asked, for people."""
        return self._source.snapshot or self._source.replay

    async def snapshot(self) -> bool:
        """Tell its whole cache; False where it cannot be had."""
        url = self._source.snapshot
        heard_seq = self._teller.next_seq - 1
        if url is None:
            return False
        try:
            timeout = aiohttp.ClientTimeout(total=self._context.timeout_s * 5)
            async with self._context.http.get(url, timeout=timeout, allow_redirects=False) as reply:
                if reply.status != 200:
                    raise WireError(f"GET {url} answered {reply.status}")
                body = await read_bounded(reply, MAX_SNAPSHOT_BYTES)
            # In a thread: there may be tens of millions of tokens.
            seq, batches = await asyncio.to_thread(_batches_of_snapshot, body)
        except (aiohttp.ClientError, TimeoutError, WireError) as error:
            log.info("worker %d: no snapshot: %s", self._teller.worker_id, error)
            return False
        self._teller.snapshot(seq, batches, heard_seq)
        return True

    async def replay(self, from_seq: int) -> Replayed | None:
        """Tell the batches it kept, from `from_seq` on; None where it does not answer."""
        if self._source.replay is None:
            return None
        replayed = Replayed()
        try:
            async with asyncio.timeout(_REPLAY_MAX_S):
                again: int | None = from_seq
                while again is not None:
                    again = await self._read_replay(self._source.replay, again, replayed)
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            if isinstance(error, WireError):
                self._teller.malformed(error)
            worker_id = self._teller.worker_id
            where, why = self._source.replay, str(error) or "no answer in time"
            log.info("worker %d: replay from %d at %s failed: %s", worker_id, from_seq, where, why)
            return None
        self._teller.counters.replays += 1
        return replayed

    async def _read_replay(self, endpoint: str, from_seq: int, replayed: Replayed) -> int | None:
        """Tell the core what is replayed; None at its end, else where to ask again.

        A publisher that replays faster than we read drops what its socket has no room for (vLLM
        before 0.33), the end mark too: what is left is asked for as long as some of it comes. One
        that lacks batches for good (TensorRT-LLM, whose own queue was full) is not asked for each.
        Raises TimeoutError, WireError or zmq.ZMQError.
        """
        turn = Turn(self._context.clock)
        next_seq = None
        with opened(self._context, zmq.DEALER, _REPLAY_BATCHES) as dealer:
            dealer.connect(endpoint)
            await dealer.send_multipart(replay_request(from_seq))
            while True:
                try:
                    async with asyncio.timeout(self._context.timeout_s):
                        frames = await dealer.recv_multipart()
                except TimeoutError:
                    if next_seq is None:
                        raise
                    return next_seq
                await turn.over()
                live = parse_replay(frames)
                if live is None:
                    return None
                if next_seq is None:
                    replayed.leaps |= replayed.first_seq is not None and live.seq > from_seq
                elif live.seq > next_seq and not replayed.leaps:
                    return next_seq
                if replayed.first_seq is None:
                    replayed.first_seq = live.seq
                replayed.last_seq = live.seq
                await self._teller.batch(live.seq, live.payload, "replay")
                next_seq = live.seq + 1


def _batches_of_snapshot(body: bytes) -> tuple[int, list[EventBatch]]:
    """(seq, batches) of a snapshot. Raises WireError."""
    seq, payloads = snapshot_payloads(body)
    return seq, [decoded(payload) for payload in payloads]

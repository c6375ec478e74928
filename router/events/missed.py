"""What a publisher sent while we were not listening: asked for by snapshot and by replay.

A snapshot serves a late joiner best, a replay a gap; where the first is not to be had, the other
one is asked for. The core keeps live batches meanwhile and puts everything in order.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Literal

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

_MORE_TRIES = 2
_ASK_AGAIN_S = 1.0  # between two tries at a worker that answers neither replay nor snapshot
_BETWEEN_SYNCS_S = 0.1  # a worker whose stream has gap after gap must not be asked without end
_REPLAY_BATCHES = 20_000  # that may wait for us: twice what vLLM keeps
_REPLAY_MAX_S = 30.0  # for a whole replay, however long its batches keep coming


_OVERLAP = 64  # batches asked for again of those heard: some came before we saw the connection

# Of what was missed; "anew": the publisher has nothing left of what was heard of it.
Answer = Literal["all", "some", "none", "anew"]


@dataclass(frozen=True, slots=True)
class _Question:
    """What to ask for. Lifetime: answer."""

    from_seq: int
    heard_seq: int = -1  # of what was heard up to here, something must come again

    @property
    def proves(self) -> bool:
        """Whether the answer tells if the publisher is still the one that was heard."""
        return self.heard_seq >= 0


@dataclass(slots=True)
class _Span:
    """What a replay brought, of what it had to. Lifetime: answer."""

    from_seq: int  # wanted from here
    live_seq: int  # was published before the replay was asked for, so that it must be in there
    first_seq: int | None = None
    last_seq: int = -1

    def add(self, seq: int) -> None:
        """One more batch came."""
        if self.first_seq is None:
            self.first_seq = seq
        self.last_seq = seq

    @property
    def covered(self) -> bool:
        """Whether nothing can be missing of what was published when it was asked for."""
        if self.first_seq is None:
            return self.live_seq < self.from_seq
        return self.first_seq <= self.from_seq and self.live_seq <= self.last_seq


class Missed:
    """Asks one publisher for what was missed. Lifetime: feed."""

    def __init__(self, source: ZmqSource, teller: Teller, context: FeedContext) -> None:
        self._source = source
        self._teller = teller
        self._context = context
        self._asked = asyncio.Event()  # one of the two that follow waits
        self._from_seq: int | None = None
        self._after_absence = False
        self._heard_seq: int | None = None  # when the publisher came back, the earliest time

    def ask(self, from_seq: int) -> None:
        """Ask for everything from `from_seq` on. Of several that wait, the earliest is asked."""
        waits = self._from_seq
        self._from_seq = from_seq if waits is None else min(from_seq, waits)
        self._asked.set()

    def note_absence(self) -> None:
        """The publisher was away and is back: from now on it may be another one."""
        if self._heard_seq is None:
            self._heard_seq = self._teller.next_seq - 1

    def ask_after_absence(self) -> None:
        """Ask whether the publisher is still the one that was heard, and for what it published."""
        if self._source.replay is None:  # nobody can tell but its next batch, by its number
            return
        self._after_absence = True
        self._asked.set()

    async def run(self) -> None:
        """Answer what is asked, until cancelled."""
        while True:
            await self._asked.wait()
            question = self._next_question()
            answer = await self._sync(question)
            for _ in range(self._tries_left):
                if answer != "none":
                    break
                await asyncio.sleep(_ASK_AGAIN_S)
                answer = await self._sync(question)
            if answer == "none":
                self._teller.failed_sync(self._source.snapshot or self._source.replay)
            if answer == "anew":
                self._teller.began_anew()
            elif not self._asked.is_set():  # else the next one speaks for what is missing now
                self._teller.replay_end(answer != "none")
            await asyncio.sleep(_BETWEEN_SYNCS_S if answer == "all" else _ASK_AGAIN_S)
            if answer != "all" and self._source.snapshot is not None:
                self.ask(0)  # its whole cache mends what no replay can

    def _next_question(self) -> _Question:
        if self._from_seq is not None:
            question = _Question(self._from_seq)
            self._from_seq = None
        else:
            # Where it has begun anew with lower numbers since, that was noticed by those.
            latest_seq = self._teller.next_seq - 1
            heard_seq = latest_seq if self._heard_seq is None else min(latest_seq, self._heard_seq)
            question = _Question(max(heard_seq - _OVERLAP, 0), heard_seq)
            self._after_absence, self._heard_seq = False, None
        if self._from_seq is None and not self._after_absence:
            self._asked.clear()
        return question

    @property
    def _tries_left(self) -> int:
        """How often to ask once more what nobody answered, before all that is known is given up."""
        return _MORE_TRIES if self._source.snapshot is None and self._source.replay else 0

    async def _sync(self, question: _Question) -> Answer:
        if not question.proves and question.from_seq == 0 and await self._snapshot():
            return "all"
        answer = await self._replay(question)
        if answer == "anew" or (answer == "none" and question.proves):
            return answer
        if answer != "all" and question.from_seq != 0 and await self._snapshot():
            return "all"
        return answer

    async def _snapshot(self) -> bool:
        url = self._source.snapshot
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
        self._teller.snapshot(seq, batches)
        return True

    async def _replay(self, question: _Question) -> Answer:
        if self._source.replay is None:
            return "none"
        from_seq = question.from_seq
        span = _Span(from_seq, self._teller.live_seq)
        try:
            async with asyncio.timeout(_REPLAY_MAX_S):
                again: int | None = from_seq
                while again is not None:
                    again = await self._read_replay(self._source.replay, again, span)
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            if isinstance(error, WireError):
                self._teller.malformed(error)
            worker_id = self._teller.worker_id
            where, why = self._source.replay, str(error) or "no answer in time"
            log.info("worker %d: replay from %d at %s failed: %s", worker_id, from_seq, where, why)
            return "none"
        self._teller.counters.replays += 1
        if question.proves and (span.first_seq is None or span.first_seq > question.heard_seq):
            return "anew"
        return "all" if span.covered else "some"

    async def _read_replay(self, endpoint: str, from_seq: int, span: _Span) -> int | None:
        """Tell the core what is replayed; None at its end, else where to ask again.

        A publisher that replays faster than we read drops what its socket has no room for (vLLM
        before 0.33), the end mark too: what is left is asked for as long as some of it comes.
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
                if next_seq is not None and live.seq > next_seq:
                    return next_seq
                span.add(live.seq)
                await self._teller.batch(live.seq, live.payload, "replay")
                next_seq = live.seq + 1


def _batches_of_snapshot(body: bytes) -> tuple[int, list[EventBatch]]:
    """(seq, batches) of a snapshot. Raises WireError."""
    seq, payloads = snapshot_payloads(body)
    return seq, [decoded(payload) for payload in payloads]

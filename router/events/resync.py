"""Requests the batches that a publisher sent before this router listened, by snapshot and by
replay. A snapshot suits a router that joins late, and a replay suits a gap. If one of the two is
not available, the other is requested. If several routers share their state, a copy from another
router is the third choice. Meanwhile the core keeps live batches, and applies everything in order.
Only the core knows whether something is still missing (`router.core.workers.kv_state`); this module
only requests snapshots again while the core wants one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import aiohttp
import zmq
import zmq.asyncio

from engine.wire.events import (
    MAX_SNAPSHOT_BYTES,
    WireError,
    parse_replay,
    replay_request,
    snapshot_payloads,
)
from kvkernels import EventBatch
from router.events.delivery import Delivery, FeedContext, LoopYield, decoded, read_bounded
from router.events.sources import ZmqSource
from router.events.zmq_sockets import opened

log = logging.getLogger(__name__)

_REPLAY_BATCHES = 20_000  # that may wait for us: twice what vLLM keeps
_REPLAY_MAX_S = 30.0  # for a replay to bring a later batch, however many come again


@dataclass(slots=True)
class Replayed:
    """The result of a replay that the publisher answered. Lifetime: one answer."""

    later_s: float  # when it was asked for, or brought a later batch than all before
    first_seq: int | None = None  # of its batches
    last_seq: int = -1
    leaps: bool = False  # batches are missing in it that it lacked when asked for them alone


class ZmqPublisher:
    """Requests snapshots and replays from the publisher of a `ZmqSource`, and passes the answers to
    the core at once. Lifetime: feed.
    """

    def __init__(self, source: ZmqSource, delivery: Delivery, context: FeedContext) -> None:
        self._source = source
        self._delivery = delivery
        self._context = context

    @property
    def has_snapshot(self) -> bool:
        """True if the publisher offers snapshots of its whole cache."""
        return self._source.snapshot is not None

    @property
    def has_replay(self) -> bool:
        """True if the publisher can replay batches."""
        return self._source.replay is not None

    @property
    def where(self) -> str | None:
        """The address to which requests go, as a text for people, or None if there is none."""
        return self._source.snapshot or self._source.replay

    async def snapshot(self) -> bool:
        """Request a snapshot of the publisher's whole cache, and pass it to the core. Return False
        if no snapshot is available.
        """
        url = self._source.snapshot
        heard_seq = self._delivery.next_seq - 1
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
            log.info("%s: no snapshot: %s", self._delivery.label, error)
            return False
        self._delivery.snapshot(seq, batches, heard_seq)
        return True

    async def replay(self, from_seq: int) -> Replayed | None:
        """Request the batches from number `from_seq` on that the publisher kept, and pass them to
        the core. Return None if the publisher does not answer.
        """
        if self._source.replay is None:
            return None
        replayed = Replayed(self._context.clock())
        try:
            again: int | None = from_seq
            while again is not None:
                again = await self._read_replay(self._source.replay, again, replayed)
        except (TimeoutError, WireError, zmq.ZMQError) as error:
            if isinstance(error, WireError):
                self._delivery.malformed(error)
            label = self._delivery.label
            where, why = self._source.replay, str(error) or "no answer in time"
            log.info("%s: replay from %d at %s failed: %s", label, from_seq, where, why)
            return None
        self._delivery.counters.replays += 1
        return replayed

    async def _read_replay(self, endpoint: str, from_seq: int, replayed: Replayed) -> int | None:
        """Pass replayed batches to the core. Return None at the end of the replay, else the number
        of the batch from which to ask again. A publisher that replays faster than the router reads
        drops the batches that its socket cannot hold (vLLM before 0.33), even the end mark. The
        missing batches are requested again as long as each answer brings some of them. Batches that
        the publisher lacks for good (TensorRT-LLM, whose own queue was full) are not requested one
        by one. Raises WireError, zmq.ZMQError or TimeoutError if an answer fails, and also if an
        answer brings only batches that came before.
        """
        clock = self._context.clock
        pause = LoopYield(clock)
        next_seq = None
        with opened(self._context, zmq.DEALER, _REPLAY_BATCHES) as dealer:
            dealer.connect(endpoint)
            await dealer.send_multipart(replay_request(from_seq))
            while True:
                left_s = replayed.later_s + _REPLAY_MAX_S - clock()
                if left_s <= 0.0:  # what waits here already would go on for ever
                    raise TimeoutError
                try:
                    async with asyncio.timeout(min(self._context.timeout_s, left_s)):
                        frames = await dealer.recv_multipart()
                except TimeoutError:
                    if next_seq is None or left_s < self._context.timeout_s:
                        raise
                    return next_seq
                await pause.over()
                live = parse_replay(frames)
                if live is None:
                    return None
                if next_seq is None:
                    replayed.leaps |= replayed.first_seq is not None and live.seq > from_seq
                elif live.seq > next_seq and not replayed.leaps:
                    return next_seq
                if replayed.first_seq is None:
                    replayed.first_seq = live.seq
                if live.seq > replayed.last_seq:
                    replayed.last_seq, replayed.later_s = live.seq, clock()
                try:
                    await self._delivery.batch(live.seq, live.payload, "replay")
                except WireError as error:
                    self._delivery.unreadable(live.seq, live.payload, error)
                next_seq = live.seq + 1


def _batches_of_snapshot(body: bytes) -> tuple[int, list[EventBatch]]:
    """Return the batch number and the batches of a snapshot. Raises WireError if the snapshot is
    malformed.
    """
    seq, payloads = snapshot_payloads(body)
    return seq, [decoded(payload) for payload in payloads]


_MORE_TRIES = 2
_ASK_AGAIN_S = 1.0  # between two tries at a worker that answers neither replay nor snapshot
_BETWEEN_SYNCS_S = 0.1  # a worker whose stream has gap after gap must not be asked without end
_OVERLAP = 64  # batches asked for again of those heard: some came before we saw the connection

# What became of a question; "anew": the publisher has nothing left of what was heard of it.
Answer = Literal["told", "none", "anew"]


@dataclass(frozen=True, slots=True)
class _Question:
    """A request for missed batches. Lifetime: until it is answered."""

    from_seq: int
    heard_seq: int = -1  # of what was heard up to here, something must come again

    @property
    def proves(self) -> bool:
        """True if the answer to this request shows whether the publisher is still the same."""
        return self.heard_seq >= 0

    def proven_by(self, replayed: Replayed) -> bool:
        """Return whether the replay contains the batches that were received before. The core
        compares these batches by their digests.
        """
        first_seq, last_seq = replayed.first_seq, replayed.last_seq
        return first_seq is not None and first_seq <= self.heard_seq <= last_seq


async def _cannot_borrow() -> bool:
    return False


class Resynchronizer:
    """Requests missed batches from one publisher. Lifetime: feed."""

    def __init__(
        self,
        asked: ZmqPublisher,
        delivery: Delivery,
        wants_snapshot: Callable[[], bool],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        borrowed: Callable[[], Awaitable[bool]] = _cannot_borrow,
    ) -> None:
        """Make an object that requests batches from the publisher `asked`. `wants_snapshot` returns
        whether the core wants a snapshot. `pause` waits for a number of seconds. `borrowed` returns
        whether another router has passed on its copy of the cache's state.
        """
        self._publisher = asked
        self._delivery = delivery
        self._wants_snapshot = wants_snapshot
        self._borrowed = borrowed
        self._pause = pause
        self._requested = asyncio.Event()  # one of the three that follow waits
        self._from_seq: int | None = None
        self._wants_rest = False
        self._after_absence = False
        # The last batch heard when the publisher came back: the first time, and the latest one.
        self._heard_at: tuple[int, int] | None = None

    def request_from(self, from_seq: int) -> None:
        """Request all batches from number `from_seq` on. If several requests are pending, the one
        with the lowest number counts.
        """
        waits = self._from_seq
        self._from_seq = from_seq if waits is None else min(from_seq, waits)
        self._requested.set()

    def request_rest(self) -> None:
        """Request all batches after the last one that was received. Which one is the last is
        decided when the request is sent.
        """
        self._wants_rest = True
        self._requested.set()

    def note_absence(self) -> None:
        """Note that the publisher was away and is back, so that it may be another publisher."""
        heard_seq = self._delivery.next_seq - 1
        first_seq = heard_seq if self._heard_at is None else self._heard_at[0]
        self._heard_at = first_seq, heard_seq

    def request_after_reconnect(self) -> None:
        """Check whether the publisher is still the same, and request what it published while the
        connection was lost.
        """
        if not self._publisher.has_replay:
            # Even another publisher's snapshot contains its whole cache.
            if self._publisher.has_snapshot:
                self.request_from(0)
            return  # else no answer can show it
        self._after_absence = True
        self._requested.set()

    async def run(self) -> None:
        """Send the pending requests until cancelled."""
        while True:
            await self._requested.wait()
            question = self._next_question()
            answer = await self._sync(question)
            for _ in range(self._tries_left):
                if answer != "none":
                    break
                await self._pause(_ASK_AGAIN_S)
                answer = await self._sync(question)
            self._report_end(question, answer)
            unanswered = answer == "none"
            well = not (unanswered or self._lacking)
            await self._pause(_BETWEEN_SYNCS_S if well else _ASK_AGAIN_S)
            if self._publisher.has_snapshot and (
                unanswered or (self._lacking and not self._requested.is_set())
            ):
                self.request_from(
                    0
                )  # a snapshot of its whole cache repairs gaps that no replay can fill

    def _report_end(self, question: _Question, answer: Answer) -> None:
        """Tell the core that the replay has ended. If another request is pending, the end of that
        request is reported instead.
        """
        if answer == "none":
            where = self._publisher.where
            why = f"no usable answer at {where}" if where else "it has no replay endpoint"
            self._delivery.failed_sync(why)
        if answer == "anew":
            self._delivery.on_publisher_replaced()
        elif not self._requested.is_set():
            self._delivery.replay_end(answer != "none")
        elif answer == "none" and not question.proves:
            self.request_from(question.from_seq)

    def _next_question(self) -> _Question:
        if self._after_absence:  # first: of another one, a snapshot tells nothing of what was heard
            latest_seq = self._delivery.next_seq - 1
            first_seq, heard_seq = self._heard_at or (latest_seq, latest_seq)
            question = _Question(max(min(first_seq, heard_seq) - _OVERLAP, 0), heard_seq)
            self._after_absence, self._heard_at = False, None
        else:
            rest_seq = self._delivery.next_seq
            from_seq = rest_seq if self._from_seq is None else self._from_seq
            question = _Question(min(from_seq, rest_seq) if self._wants_rest else from_seq)
            self._from_seq, self._wants_rest = None, False
        if self._from_seq is None and not (self._wants_rest or self._after_absence):
            self._requested.clear()
        return question

    @property
    def _tries_left(self) -> int:
        """The number of times that a request without an answer is sent again, before the router
        gives up what it knows of the worker's cache.
        """
        publisher = self._publisher
        return _MORE_TRIES if publisher.has_replay and not publisher.has_snapshot else 0

    @property
    def _lacking(self) -> bool:
        """True if a snapshot should be requested, according to what the core knows now."""
        return self._publisher.has_snapshot and self._wants_snapshot()

    async def _sync(self, question: _Question) -> Answer:
        publisher, from_seq = self._publisher, question.from_seq
        is_whole = from_seq == 0 and not question.proves
        if is_whole and (await publisher.snapshot() or await self._borrowed()):
            return "told"
        replayed = await publisher.replay(from_seq)
        if question.proves:
            if replayed is None:
                return "none"
            if not question.proven_by(replayed):
                return "anew"
            # If another publisher continues the numbers of a snapshot that came from the former
            # one, no batch shows it: the batches in the snapshot were never received.
            if publisher.has_snapshot:
                return "told" if await publisher.snapshot() else "none"
        may_mend = from_seq != 0 and not self._requested.is_set()  # else the next question is asked
        if may_mend and (replayed is None or self._lacking) and await publisher.snapshot():
            return "told"
        if may_mend and self._wants_snapshot() and await self._borrowed():
            return "told"
        return "none" if replayed is None else "told"

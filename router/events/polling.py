"""Events that are asked for by HTTP, again and again: TensorRT-LLM's `trtllm-serve`.

Reading destroys, so there is one reader a URL, whatever the number of ranks behind it. Event
numbers are our sequence numbers: a hole, made by a full buffer there or by an answer that was
lost, is a gap that nobody can replay.
"""

from __future__ import annotations

import asyncio
from functools import partial

import aiohttp

from engine.wire import WireError, encode_batch
from engine.wire.events import MAX_PAYLOAD_BYTES
from router.events.answers import read_bounded
from router.events.hub import Hub, Key, Seat
from router.events.source import PollSource
from router.events.telling import FeedContext, FeedCounters, Teller, Turn
from router.events.trtllm import PolledEvent, Windows, read_answer, wire_events

_BETWEEN_POLLS_S = 0.05  # the worker itself waits up to 2 s for events before it answers
_ASK_AGAIN_S = 1.0  # of a worker that did not answer
# What is in an answer that we no longer wait for is lost: wait long.
_ANSWER_S = 30.0
_WAITING_ANSWERS = 16

Answer = list[PolledEvent | WireError] | Exception  # as given to each rank


class PolledFeed:
    """Lifetime: worker. `run` ends when cancelled."""

    def __init__(
        self, source: PollSource, worker_id: int, model: str, context: FeedContext
    ) -> None:
        self._source = source
        self._context = context
        self._teller = Teller(worker_id, model, context)
        self._windows = Windows()
        self._gap_open = False

    @property
    def counters(self) -> FeedCounters:
        """What happened so far."""
        return self._teller.counters

    def resync(self, from_seq: int) -> None:
        """Nobody can: it is answered so with the next event or poll."""
        self._gap_open = True

    async def run(self) -> None:
        """Follow the events until cancelled. Raises ValueError where a worker has them already."""
        context, source = self._context, self._source
        async with context.hubs.joined(
            source.url,
            source.rank,
            _WAITING_ANSWERS,
            self._teller.dropped,
            partial(_read, context),
        ) as seat:
            self._teller.replay_end(answered=False)  # what was before is not to be had
            await self._listen(seat)

    async def _listen(self, seat: Seat) -> None:
        turn = Turn(self._context.clock)
        while True:
            answer: Answer = await seat.receive()
            if isinstance(answer, Exception):
                self._teller.failed_poll(answer)
                continue
            for event in answer:
                await turn.over()
                await self._take(event)
                self._give_up()
            self._give_up()

    def _give_up(self) -> None:
        if self._gap_open:
            self._gap_open = False
            # At a router's start it is what the one before had read.
            why = f"{self._source.url} forgets what it told; has it another reader?"
            self._teller.failed_sync(why)
            self._teller.replay_end(answered=False)

    async def _take(self, event: PolledEvent | WireError) -> None:
        if isinstance(event, WireError):
            self._teller.malformed(event)
            return
        if event.number < self._teller.next_seq:  # its engine began anew
            self._windows = Windows()
        events, skipped = wire_events(event) if self._windows.counts(event) else ([], 0)
        self._teller.counters.skipped_events += skipped
        try:
            # No digest: the first events of every life of an engine are the same.
            await self._teller.batch(event.number, encode_batch(0.0, events), "live", digest=0)
        except WireError as error:
            self._teller.malformed(error)


async def _read(context: FeedContext, hub: Hub) -> None:
    """Ask for events and hand each to the worker whose rank it has."""
    while True:
        try:
            events = read_answer(await _answer(context, hub.address))
        except (aiohttp.ClientError, TimeoutError, WireError) as error:
            hub.give_all(error)
            await asyncio.sleep(_ASK_AGAIN_S)
            continue
        of_rank: dict[Key, list[PolledEvent | WireError]] = {rank: [] for rank in hub.seats}
        for event in events:
            if isinstance(event, WireError):  # whose it was, nobody can tell
                for shares in of_rank.values():
                    shares.append(event)
            else:
                of_rank.setdefault(event.rank or 0, []).append(event)
        for rank, share in of_rank.items():
            hub.give(rank, share)
        await asyncio.sleep(_BETWEEN_POLLS_S)


async def _answer(context: FeedContext, url: str) -> bytes:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=context.timeout_s)
    async with context.http.post(url, timeout=timeout, allow_redirects=False) as reply:
        if reply.status != 200:
            raise aiohttp.ClientResponseError(
                reply.request_info, reply.history, status=reply.status, message="no events"
            )
        return await read_bounded(reply, MAX_PAYLOAD_BYTES)

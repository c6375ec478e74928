"""Polls TensorRT-LLM's KV events from `POST /kv_cache_events`, and converts them to the router's
own form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from engine.wire.events import (
    MAX_BLOCKS,
    MAX_PAYLOAD_BYTES,
    BlockRemoved,
    BlockStored,
    Event,
    WireError,
    encode_batch,
)
from router.events.delivery import (
    Delivery,
    FeedContext,
    FeedCounters,
    Key,
    LoopYield,
    ReaderQueue,
    SharedReader,
    read_bounded,
)
from router.events.sources import MAX_RANK, PollSource

MAX_POLLED = 1 << 20  # events of one answer
_MEDIA = ("GPU", "CPU", "DISK")  # of the cache levels 0, 1, 2

_Name = int | Annotated[str, Meta(pattern="^(0x)?[0-9a-fA-F]{1,64}$")]
_Level = Annotated[int, Meta(ge=0, lt=len(_MEDIA))]
_Window = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Token(msgspec.Struct):
    token_id: int | str
    token_extra_id: int = 0  # of prompt tuning: the block is more than its tokens


class _Image(msgspec.Struct):
    hash: Annotated[str, Meta(max_length=256)]
    start_offset: int = 0


class _Block(msgspec.Struct):
    block_hash: _Name
    tokens: list[_Token]
    cache_level: _Level = 0
    cache_salt: str | None = None
    mm_keys: list[_Image] | None = None


class _Created(msgspec.Struct, tag="created"):
    num_blocks_per_cache_level: list[int] = []


class _Stored(msgspec.Struct, tag="stored"):
    blocks: Annotated[list[_Block], Meta(max_length=MAX_BLOCKS)]
    parent_hash: _Name | None = None


class _Removed(msgspec.Struct, tag="removed"):
    block_hashes: Annotated[list[_Name], Meta(max_length=MAX_BLOCKS)]


class _Levels(msgspec.Struct):
    old_value: _Level
    new_value: _Level


class _Updated(msgspec.Struct, tag="updated"):
    block_hash: _Name
    cache_level: _Levels | None = None


class PolledEvent(msgspec.Struct):
    """One event of an answer. `number` counts the events of each rank from 0."""

    number: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = msgspec.field(name="event_id")
    data: _Created | _Stored | _Removed | _Updated
    window_tokens: _Window | None = msgspec.field(name="window_size", default=None)
    rank: Annotated[int, Meta(ge=0, le=MAX_RANK)] | None = msgspec.field(
        name="attention_dp_rank", default=None
    )


_answers = msgspec.json.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=MAX_POLLED)])
_events = msgspec.json.Decoder(PolledEvent)


def read_answer(body: bytes) -> Iterator[PolledEvent | WireError]:
    """Yield the events of an answer in order, with an error in place of each event that cannot be
    read. Raises WireError at once if the body is not an array.
    """
    try:
        raws = _answers.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"answer with KV events: {error}") from error
    return map(_read_event, raws)


def _read_event(raw: msgspec.Raw) -> PolledEvent | WireError:
    try:
        return _events.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return WireError(f"polled KV event: {error}")


class Windows:
    """Selects the events of the largest attention window, because those of the other windows repeat
    the same blocks.

    The `created` events at the start name the windows; a reader that joins later learns them from
    the events. Lifetime: one life of the engine.
    """

    def __init__(self) -> None:
        self._largest_tokens = 0

    def counts(self, event: PolledEvent) -> bool:
        """Return whether this event should be used. Releases of the engine whose events name no
        window have only one window.
        """
        if event.window_tokens is None:
            return True
        self._largest_tokens = max(self._largest_tokens, event.window_tokens)
        return event.window_tokens == self._largest_tokens


def wire_events(event: PolledEvent) -> tuple[list[Event], int]:
    """Return the wire events for an event about blocks, and the number of skipped blocks, whose
    tokens are not plain ids. Block names of any width are shortened to 64 bits. A partial block at
    the end of a sequence keeps its own size, by which it is recognized.
    """
    data = event.data
    if isinstance(data, _Stored):
        return _stored(data)
    if isinstance(data, _Removed):  # from any level: the event does not name it
        names = tuple(_name(given) for given in data.block_hashes)
        return [BlockRemoved(names, medium) for medium in _MEDIA], 0
    if isinstance(data, _Updated) and data.cache_level is not None:
        return _moved(_name(data.block_hash), data.cache_level), 0
    return [], 0


def _stored(data: _Stored) -> tuple[list[Event], int]:
    events: list[Event] = []
    parent = None if data.parent_hash is None else _name(data.parent_hash)
    for (size, level, plain), group in groupby(data.blocks, _kind):
        blocks = list(group)
        if not plain or not size:
            return events, 1  # the rest of the sequence no longer has a parent
        names = tuple(_name(block.block_hash) for block in blocks)
        events.append(
            BlockStored(
                hashes=names,
                parent=parent,
                tokens=tuple(int(token.token_id) for block in blocks for token in block.tokens),
                block_size=size,
                medium=_MEDIA[level],
                extra_keys=_extra_keys(blocks),
                cache_salt=blocks[0].cache_salt if parent is None else None,
            )
        )
        parent = names[-1]
    return events, 0


def _kind(block: _Block) -> tuple[int, int, bool]:
    """Return the key by which consecutive blocks are joined into one wire event."""
    plain = all(isinstance(t.token_id, int) and not t.token_extra_id for t in block.tokens)
    return len(block.tokens), block.cache_level, plain


def _extra_keys(blocks: Sequence[_Block]) -> list[Any] | None:
    if not any(block.mm_keys for block in blocks):
        return None
    keys = [[[image.hash, image.start_offset] for image in b.mm_keys or ()] for b in blocks]
    return [entry or None for entry in keys]


def _moved(name: int, levels: _Levels) -> list[Event]:
    """Return the events for a block that moves between tiers. The block is stored in the new tier
    before it is removed from the old one, because the entry in the old tier identifies it.
    """
    if levels.old_value == levels.new_value:
        return []
    stored = BlockStored((name,), medium=_MEDIA[levels.new_value])
    return [stored, BlockRemoved((name,), _MEDIA[levels.old_value])]


def _name(given: int | str) -> int:
    """Return the last 8 bytes of a block's name as a number; vLLM shortens its names in the same
    way.
    """
    return (int(given, 16) if isinstance(given, str) else given) % 2**64


_BETWEEN_POLLS_S = 0.05  # the worker itself waits up to 2 s for events before it answers
_ASK_AGAIN_S = 1.0  # of a worker that did not answer
# Events in an answer that arrives after the timeout are lost: wait long.
_ANSWER_S = 30.0
_WAITING_ANSWERS = 16

Answer = list[PolledEvent | WireError] | Exception  # as given to each rank


class PolledFeed:
    """A feed that polls one worker's KV events from TensorRT-LLM. `run` ends when it is cancelled.
    Lifetime: worker.
    """

    def __init__(
        self, source: PollSource, worker_id: int, model: str, context: FeedContext
    ) -> None:
        self._source = source
        self._context = context
        self._delivery = Delivery(worker_id, model, context)
        self._windows = Windows()
        self._gap_open = False

    @property
    def counters(self) -> FeedCounters:
        """The counters of this worker's KV events so far."""
        return self._delivery.counters

    def resync(self, from_seq: int) -> None:
        """Note a gap in the events. TensorRT-LLM cannot replay events, so the next event or poll
        reports to the core that the gap stays.
        """
        self._gap_open = True

    async def run(self) -> None:
        """Read the events until cancelled. Raises ValueError if another worker's feed reads the
        same events.
        """
        context, source = self._context, self._source
        async with context.readers.joined(
            source.url,
            source.rank,
            _WAITING_ANSWERS,
            self._delivery.dropped,
            partial(_read, context),
        ) as queue:
            self._delivery.replay_end(answered=False)  # the earlier events cannot be had any more
            await self._listen(queue)

    async def _listen(self, queue: ReaderQueue) -> None:
        pause = LoopYield(self._context.clock)
        while True:
            answer: Answer = await queue.receive()
            if isinstance(answer, Exception):
                self._delivery.failed_poll(answer)
                continue
            for event in answer:
                await pause.over()
                await self._take(event)
                self._give_up()
            self._give_up()

    def _give_up(self) -> None:
        if self._gap_open:
            self._gap_open = False
            # At the router's start, the previous router has read the earlier events.
            why = f"{self._source.url} forgets what it told; has it another reader?"
            self._delivery.failed_sync(why)
            self._delivery.replay_end(answered=False)

    async def _take(self, event: PolledEvent | WireError) -> None:
        if isinstance(event, WireError):
            self._delivery.malformed(event)
            return
        if event.number < self._delivery.next_seq:  # its engine has restarted
            self._windows = Windows()
        is_counted = self._windows.counts(event)
        events, skipped = wire_events(event) if is_counted else ([], 0)
        self._delivery.counters.other_windows += not is_counted
        if skipped:
            self._delivery.skipped({"bad_tokens": skipped})
        try:
            # No digest: the first events of every life of an engine are the same.
            await self._delivery.batch(event.number, encode_batch(0.0, events), "live", digest=0)
        except WireError as error:
            self._delivery.malformed(error)


async def _read(context: FeedContext, shared: SharedReader) -> None:
    """Poll for events again and again, and pass each event to the feed of its rank."""
    while True:
        async with shared.polling:
            if shared.finishing:
                await asyncio.Event().wait()  # until the last feed ends
            pause_s = await _poll(context, shared)
        await asyncio.sleep(pause_s)


async def _poll(context: FeedContext, shared: SharedReader) -> float:
    """Poll for events once. Return the seconds to wait before the next poll."""
    try:
        events = read_answer(await _answer(context, shared.address))
    except (aiohttp.ClientError, TimeoutError, WireError) as error:
        shared.give_all(error)
        return _ASK_AGAIN_S
    of_rank: dict[Key, list[PolledEvent | WireError]] = {rank: [] for rank in shared.queues}
    for event in events:
        if isinstance(event, WireError):  # the event's worker is unknown
            for shares in of_rank.values():
                shares.append(event)
        else:
            of_rank.setdefault(event.rank or 0, []).append(event)
    for rank, share in of_rank.items():
        shared.give(rank, share)
    return _BETWEEN_POLLS_S


async def _answer(context: FeedContext, url: str) -> bytes:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=context.timeout_s)
    async with context.http.post(url, timeout=timeout, allow_redirects=False) as reply:
        if reply.status != 200:
            raise aiohttp.ClientResponseError(
                reply.request_info, reply.history, status=reply.status, message="no events"
            )
        return await read_bounded(reply, MAX_PAYLOAD_BYTES)

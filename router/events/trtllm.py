"""TensorRT-LLM's KV events as `POST /kv_cache_events` of `trtllm-serve` gives them, in our words.

An answer is a JSON array of events `{event_id, window_size?, attention_dp_rank?, data}`. They are
turned into wire events, so that from there on they are batches like any other. Format: NVIDIA
TensorRT-LLM, `cpp/tensorrt_llm/executor/jsonSerialization.cpp`, `tensorrt_llm/_utils.py` and
`runtime/kv_cache_manager_v2/_event_manager.py`, 1.0 to 2026-08.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.wire import BlockRemoved, BlockStored, Event, WireError
from engine.wire.events import MAX_BLOCKS
from router.events.source import MAX_RANK

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
    """One event of an answer. `number` is consecutive per rank, from 0."""

    number: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = msgspec.field(name="event_id")
    data: _Created | _Stored | _Removed | _Updated
    window_tokens: _Window | None = msgspec.field(name="window_size", default=None)
    rank: Annotated[int, Meta(ge=0, le=MAX_RANK)] | None = msgspec.field(
        name="attention_dp_rank", default=None
    )


_answers = msgspec.json.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=MAX_POLLED)])
_events = msgspec.json.Decoder(PolledEvent)


def read_answer(body: bytes) -> Iterator[PolledEvent | WireError]:
    """The events of an answer, in its order; an error in place of one that cannot be read.

    Raises WireError, at once, where the body is no array.
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
    """Keeps the events of the largest attention window: of the others each tells the same blocks.

    The windows are named by the `created` events at the start; who came later goes by what is
    seen. Lifetime: one life of the engine.
    """

    def __init__(self) -> None:
        self._largest_tokens = 0

    def counts(self, event: PolledEvent) -> bool:
        """Whether to take this event. Releases that name no window have one only."""
        if event.window_tokens is None:
            return True
        self._largest_tokens = max(self._largest_tokens, event.window_tokens)
        return event.window_tokens == self._largest_tokens


def wire_events(event: PolledEvent) -> tuple[list[Event], int]:
    """(wire events, skipped): what an event says of blocks.

    Names of any width are shortened to 64 bits. A partial block at the end of a sequence keeps
    its own size, by which it is known as one. Skipped: blocks whose tokens are not plain ids.
    """
    data = event.data
    if isinstance(data, _Stored):
        return _stored(data)
    if isinstance(data, _Removed):  # from whichever level: it does not say
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
            return events, 1  # what follows in the sequence has no parent any more
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
    """Blocks of one kind that follow one another make one wire event."""
    plain = all(isinstance(t.token_id, int) and not t.token_extra_id for t in block.tokens)
    return len(block.tokens), block.cache_level, plain


def _extra_keys(blocks: Sequence[_Block]) -> list[Any] | None:
    if not any(block.mm_keys for block in blocks):
        return None
    keys = [[[image.hash, image.start_offset] for image in b.mm_keys or ()] for b in blocks]
    return [entry or None for entry in keys]


def _moved(name: int, levels: _Levels) -> list[Event]:
    """First to its new tier, while the old one still tells what it is."""
    if levels.old_value == levels.new_value:
        return []
    stored = BlockStored((name,), medium=_MEDIA[levels.new_value])
    return [stored, BlockRemoved((name,), _MEDIA[levels.old_value])]


def _name(given: int | str) -> int:
    """Its last 8 bytes, as vLLM shortens its own."""
    return (int(given, 16) if isinstance(given, str) else given) % 2**64

"""KV events on the wire: msgpack batches of vLLM and SGLang, ZMQ framing, snapshots.

The envelope is an array `[ts, events, rank]`. Each event is an array `[tag, fields...]` (vLLM to
0.23, SGLang to 0.5.18) or a map with the tag under `type` (later). Live (PUB): `[topic, seq,
payload]`. Replay (ROUTER; ask with a DEALER, because a REQ socket receives only the first reply). A
snapshot is a worker's whole prefix cache as of one batch, for consumers that join late; vLLM has
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, field


class WireError(ValueError):
    """Raised for bytes of another program that violate a wire format; the message says what is
    wrong, and where.
    """


MAX_PAYLOAD_BYTES = 32 << 20  # one batch; a full 131k-token prompt is about 0.7 MB
MAX_EVENTS = 1 << 16  # events in one batch
MAX_BLOCKS = 1 << 20  # blocks in one event
MAX_TOKENS = 1 << 23  # tokens in one event
MAX_BLOCK_SIZE = 1 << 16  # tokens a block
MAX_HASH_BYTES = 64

BlockHash = int | bytes  # an engine's own name of a block: uint64, or the raw digest as sent

_Digest = Annotated[bytes, Meta(min_length=1, max_length=MAX_HASH_BYTES)]
_Hashes = Annotated[tuple[int | _Digest, ...], Meta(max_length=MAX_BLOCKS)]
_Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Tokens = Annotated[tuple[_Token, ...], Meta(max_length=MAX_TOKENS)]
_BlockSize = Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored", tag_field="type"):
    """Event: blocks were stored in the cache. `tokens` are the tokens of the blocks in order, or
    empty (offload tiers).
    """

    hashes: _Hashes = field(name="block_hashes")
    parent: int | _Digest | None = field(name="parent_block_hash", default=None)
    tokens: _Tokens = field(name="token_ids", default=())
    block_size: _BlockSize = 1
    lora_id: int | None = None
    medium: str | None = None  # None means GPU
    lora_name: str | None = None
    extra_keys: list[Any] | None = None  # one entry a block: the parts of its hash besides tokens
    group_idx: int | None = None  # KV cache group of hybrid models
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  # SGLang's own place for it
    session_id: str | None = None

    @property
    def salt(self) -> str | None:
        """The cache salt of the sequence: SGLang's field for it, or the string among vLLM's extra
        keys of block 0. vLLM puts a LoRA name there, too; the string that equals `lora_name` is
        that name.
        """
        if self.cache_salt is not None:
            return self.cache_salt
        first = self.extra_keys[0] if self.extra_keys else None
        if self.parent is not None or not isinstance(first, list):
            return None
        names = [key for key in first if isinstance(key, str)]
        if self.lora_name in names:
            names.remove(self.lora_name)
        return names[-1] if names else None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", tag_field="type"):
    """Event: blocks of one group were evicted from `medium` (None means GPU)."""

    hashes: _Hashes = field(name="block_hashes")
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared", tag_field="type"):
    """Event: the prefix cache was reset, and every block, medium and group of that rank is gone."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    hashes: _Hashes
    parent: int | _Digest | None = None
    tokens: _Tokens = ()
    block_size: _BlockSize = 1
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class Batch(msgspec.Struct, frozen=True):
    """One decoded batch of KV events. `skipped` counts valid events that cannot be used."""

    ts_s: float  # the publisher's wall clock, seconds since the epoch
    events: tuple[Event, ...]
    rank: int = 0  # data-parallel rank
    skipped: int = 0


_envelopes = msgspec.msgpack.Decoder(_Envelope)
_maps = msgspec.msgpack.Decoder(Event)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_anything = msgspec.msgpack.Decoder()
_encoder = msgspec.msgpack.Encoder()
_KNOWN_TAGS = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def decode_batch(payload: bytes) -> Batch:
    """Return the batch in `payload` (the third frame of a live message).

    Hashes are uint64. Some events are skipped and counted: those of an unknown type, those whose
    tokens are not plain ints (bigrams, multimodal strings), and those whose token count is not
    blocks x block_size. Raises WireError for anything malformed or beyond the limits of this
    module.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"event batch of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}")
    try:
        envelope = _envelopes.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"event batch: {error}") from error
    events: list[Event] = []
    for position, raw in enumerate(envelope.events):
        event = _decode_event(raw, position)
        if event is not None:
            events.append(event)
    skipped = len(envelope.events) - len(events)
    return Batch(envelope.ts, tuple(events), envelope.rank or 0, skipped)


def _decode_event(raw: msgspec.Raw, position: int) -> Event | None:
    """Return the event in these bytes; None if it cannot be used."""
    first = memoryview(raw)[0]
    is_array = first & 0xF0 == 0x90 or first in (0xDC, 0xDD)
    try:
        event = _from_array(_arrays.decode(raw)) if is_array else _maps.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if _is_foreign(raw, is_array):
            return None
        raise WireError(f"event {position} of the batch: {error}") from error
    if isinstance(event, AllBlocksCleared):
        return event
    if isinstance(event, BlockStored):
        if event.tokens and len(event.tokens) != len(event.hashes) * event.block_size:
            return None
        if event.parent is not None:
            event = msgspec.structs.replace(event, parent=name_of(event.parent))
    return msgspec.structs.replace(event, hashes=tuple(map(name_of, event.hashes)))


def name_of(name: BlockHash) -> int:
    """Return a block's hash as uint64: an int modulo 2^64, or the last 8 bytes of a digest,
    big-endian, as vLLM itself shortens it.
    """
    return int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name % 2**64


def _from_array(event: _StoredArray | _RemovedArray | _ClearedArray) -> Event:
    if isinstance(event, _StoredArray):
        return BlockStored(*msgspec.structs.astuple(event))
    if isinstance(event, _RemovedArray):
        return BlockRemoved(*msgspec.structs.astuple(event))
    return AllBlocksCleared()


def _is_foreign(raw: msgspec.Raw, is_array: bool) -> bool:
    """Return whether a well-formed event has an unknown type, or tokens that this program cannot
    hash.
    """
    try:
        event: Any = _anything.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    if is_array:
        tag = event[0] if event else None
        tokens = event[3] if len(event) > 3 else ()
    elif isinstance(event, dict):
        tag, tokens = event.get("type"), event.get("token_ids", ())
    else:
        return False
    if not isinstance(tag, str):
        return False
    if tag not in _KNOWN_TAGS:
        return True
    return tag == "BlockStored" and isinstance(tokens, list) and _has_odd_tokens(tokens)


def _has_odd_tokens(tokens: list[Any]) -> bool:
    """Return whether the tokens have forms that other engines use besides ints: pairs of ints, and
    strings.
    """
    return any(isinstance(token, str | list) for token in tokens)


def encode_batch(ts_s: float, events: Iterable[Event], rank: int = 0) -> bytes:
    """Return the payload of one batch in map form, with fields in vLLM's order (0.24 and later)."""
    return _encoder.encode([ts_s, [event_map(event) for event in events], rank])


def event_map(event: Event) -> dict[str, Any]:
    """Return an event as a map: fields that vLLM requires are always in it, optional ones only if
    they are set.
    """
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    fields: dict[str, Any]
    optional: Sequence[str]
    if isinstance(event, BlockRemoved):
        fields = {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.medium}
        optional = ("group_idx",)
    else:
        fields = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": event.tokens,
            "block_size": event.block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
            "lora_name": event.lora_name,
        }
        optional = _OPTIONAL_STORED
    fields.update(
        (name, getattr(event, name)) for name in optional if getattr(event, name) is not None
    )
    return fields


_OPTIONAL_STORED = (
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "cache_salt",
    "session_id",
)


END_SEQ = (1 << 64) - 1  # -1 as unsigned: the replay is over
MAX_SEQ = (1 << 63) - 1  # no publisher counts so far, and one more is still a valid number
MAX_TOPIC_BYTES = 1024


_END = END_SEQ.to_bytes(8, "big")


class Live(NamedTuple):
    """The parts of a live message of KV events: topic, number and payload."""

    topic: str
    seq: int
    payload: bytes


def live_frames(topic: str, seq: int, payload: bytes) -> list[bytes]:
    """Return the three frames of a live message."""
    return [topic.encode(), seq.to_bytes(8, "big"), payload]


def parse_live(frames: Sequence[bytes]) -> Live:
    """Return the live message in `frames`. Raises WireError if they are no such message."""
    if len(frames) != 3:
        raise WireError(f"live message of {len(frames)} frames; expected topic, seq, payload")
    return Live(_topic(frames[0]), _seq(frames[1]), frames[2])


def replay_request(start_seq: int) -> list[bytes]:
    """Return the frames that a DEALER socket sends to get every buffered batch from
    `start_seq` on.
    """
    return [b"", start_seq.to_bytes(8, "big")]


def parse_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the client's identity and the start_seq from the frames that a ROUTER socket receives.
    Raises WireError for other frames.
    """
    if len(frames) != 3 or frames[1] != b"":
        raise WireError("replay request must be three frames: identity, empty, start_seq")
    return frames[0], _seq(frames[2])


def replay_frames(identity: bytes, topic: str, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames that a ROUTER socket sends as one reply."""
    return [identity, b"", topic.encode(), seq.to_bytes(8, "big"), payload]


def replay_end(identity: bytes) -> list[bytes]:
    """Return the frames that a ROUTER socket sends as the end of its replies."""
    return [identity, b"", b"", END_SEQ.to_bytes(8, "big"), b""]


def parse_replay(frames: Sequence[bytes]) -> Live | None:
    """Return one reply from the frames that a DEALER socket receives, in the old form or the new;
    None at the end marker.
    """
    if len(frames) not in (3, 4) or frames[0] != b"":
        raise WireError(f"replay reply of {len(frames)} frames; expected an empty one and 2 or 3")
    if frames[-2] == _END:
        return None
    return Live(_topic(frames[1]) if len(frames) == 4 else "", _seq(frames[-2]), frames[-1])


def _seq(frame: bytes) -> int:
    if len(frame) != 8:
        raise WireError(f"sequence number of {len(frame)} bytes; expected 8")
    seq = int.from_bytes(frame, "big")
    if seq > MAX_SEQ:
        raise WireError(f"sequence number {seq}; at most {MAX_SEQ}")
    return seq


def _topic(frame: bytes) -> str:
    if len(frame) > MAX_TOPIC_BYTES:
        raise WireError(f"topic of {len(frame)} bytes; at most {MAX_TOPIC_BYTES}")
    try:
        return frame.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"topic is not UTF-8: {error}") from error


VERSION = 1
MAX_SNAPSHOT_BYTES = 256 << 20
_BLOCKS_PER_BATCH = 1 << 15  # keeps every batch far below events.MAX_PAYLOAD_BYTES


class _Body(msgspec.Struct, frozen=True):
    version: int
    seq: int
    batches: list[bytes]


class Snapshot(msgspec.Struct, frozen=True):
    """The contents of a cache after the batch numbered `seq`; live batches from `seq + 1` on follow
    it.
    """

    seq: int
    batches: tuple[Batch, ...]


_decoder = msgspec.msgpack.Decoder(_Body)


def encode_snapshot(seq: int, ts_s: float, events: Iterable[BlockStored]) -> bytes:
    """Return the body of a snapshot. In `events`, parents come before their children."""
    batches: list[bytes] = []
    part: list[BlockStored] = []
    blocks = 0
    for event in events:
        part.append(event)
        blocks += len(event.hashes)
        if blocks >= _BLOCKS_PER_BATCH:
            batches.append(encode_batch(ts_s, part))
            part, blocks = [], 0
    if part:
        batches.append(encode_batch(ts_s, part))
    return msgspec.msgpack.encode(_Body(VERSION, seq, batches))


def decode_snapshot(body: bytes) -> Snapshot:
    """Return the snapshot in `body`. Raises WireError."""
    seq, payloads = snapshot_payloads(body)
    return Snapshot(seq, tuple(decode_batch(payload) for payload in payloads))


def snapshot_payloads(body: bytes) -> tuple[int, list[bytes]]:
    """Return the number of the last batch that a snapshot includes, and its undecoded batches.
    Raises WireError.
    """
    if len(body) > MAX_SNAPSHOT_BYTES:
        raise WireError(f"snapshot of {len(body)} bytes; at most {MAX_SNAPSHOT_BYTES}")
    try:
        parts = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"snapshot: {error}") from error
    if parts.version != VERSION:
        raise WireError(f"snapshot of version {parts.version}; this program reads {VERSION}")
    if not -1 <= parts.seq < 1 << 63:
        raise WireError(f"snapshot as of batch {parts.seq}")
    return parts.seq, parts.batches

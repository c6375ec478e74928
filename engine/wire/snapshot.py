"""A worker's whole prefix cache as of one batch, for consumers that join late.

vLLM has no such thing: a late joiner there replays from 0 and hopes that the buffer still has
it. Ours is `GET /kv_snapshot`: a msgpack map of `version`, `seq` (the last batch it includes;
-1 before the first) and `batches`, each the bytes of a batch of BlockStored events, parents first.
Batches with a higher seq continue it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.wire.errors import WireError
from engine.wire.events import Batch, BlockStored, decode_batch, encode_batch

VERSION = 1
MAX_SNAPSHOT_BYTES = 256 << 20
_BLOCKS_PER_BATCH = 1 << 15  # keeps every batch far below events.MAX_PAYLOAD_BYTES


class _Body(msgspec.Struct, frozen=True):
    version: int
    seq: int
    batches: list[bytes]


class Snapshot(msgspec.Struct, frozen=True):
    """What a cache held after the batch numbered `seq`; live batches from `seq + 1` continue."""

    seq: int
    batches: tuple[Batch, ...]


_decoder = msgspec.msgpack.Decoder(_Body)


def encode_snapshot(seq: int, ts_s: float, events: Iterable[BlockStored]) -> bytes:
    """Body of the answer. `events` come parents first."""
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
    """The snapshot in `body`; raises WireError."""
    seq, payloads = snapshot_payloads(body)
    return Snapshot(seq, tuple(decode_batch(payload) for payload in payloads))


def snapshot_payloads(body: bytes) -> tuple[int, list[bytes]]:
    """(number of the last batch it includes, its batches undecoded); raises WireError."""
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

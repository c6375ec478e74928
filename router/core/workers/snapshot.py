"""A snapshot of a worker's cache, and its codec for the saved file, a hot restart and peers.

The bytes are a head (`_HEAD`, big-endian: version, `next_seq`, `live_seq`, `digest`, flags) and the
blocks as `WorkerBlocks.dump` returns them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvkernels import FrozenBlocks
from policies.facts import CacheSnapshot

VERSION = 2
_HEAD = struct.Struct(">BqqQB")
_EXACT, _TURNED_OVER = 1, 2


class FrozenCache(NamedTuple):
    """A snapshot whose blocks are not yet encoded as bytes.

    Lifetime: until they are encoded.
    """

    next_seq: int
    live_seq: int
    digest: int
    exact: bool
    turned_over: bool
    blocks: FrozenBlocks

    def thawed(self) -> CacheSnapshot:
        """Return the snapshot with its blocks as bytes.

        Call this method in a thread, because it takes a while.
        """
        return CacheSnapshot(*self[:5], self.blocks.dump())

    def encoded(self) -> bytes:
        """Return the snapshot as bytes; call this in a thread."""
        return encode_snapshot(self.thawed())


def encode_snapshot(snapshot: CacheSnapshot) -> bytes:
    """Return the bytes of a snapshot, as they are saved and sent to peers."""
    flags = _EXACT * snapshot.exact | _TURNED_OVER * snapshot.turned_over
    places = snapshot.next_seq, snapshot.live_seq, snapshot.digest
    return _HEAD.pack(VERSION, *places, flags) + snapshot.blocks


def decode_snapshot(data: bytes) -> CacheSnapshot:
    """Return the snapshot in these bytes, whose blocks are checked when they are loaded.

    Raises ValueError, which says what is wrong.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"a snapshot of {len(data)} bytes")
    version, next_seq, live_seq, digest, flags = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"a snapshot of version {version}; expected {VERSION}")
    if next_seq < 0 or live_seq < -1 or flags > _EXACT | _TURNED_OVER:
        raise ValueError(f"a snapshot before batch {next_seq}, live {live_seq}, flags {flags}")
    how = bool(flags & _EXACT), bool(flags & _TURNED_OVER)
    return CacheSnapshot(next_seq, live_seq, digest, *how, data[_HEAD.size :])

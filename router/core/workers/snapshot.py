"""Converts a snapshot of a worker's cache to bytes and back.

The bytes go into the file of saved caches, to a new router in a hot restart, and to other routers.
They begin with a header (`_HEAD`, big-endian: version, `next_seq`, `live_seq`, `digest`, flags).
Then follow the blocks, as `WorkerBlocks.dump` returns them.
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
    """A snapshot of a worker's cache, whose blocks are not converted to bytes yet.

    Lifetime: until the conversion.
    """

    next_seq: int
    live_seq: int
    digest: int
    exact: bool
    turned_over: bool
    blocks: FrozenBlocks

    def thawed(self) -> CacheSnapshot:
        """Return the snapshot with its blocks as bytes.

        The conversion takes long, so call this method in a thread.
        """
        return CacheSnapshot(*self[:5], self.blocks.dump())

    def encoded(self) -> bytes:
        """Return the whole snapshot as bytes.

        The conversion takes long, so call this method in a thread.
        """
        return encode_snapshot(self.thawed())


def encode_snapshot(snapshot: CacheSnapshot) -> bytes:
    """Return a snapshot as bytes, in the format for files and for other routers."""
    flags = _EXACT * snapshot.exact | _TURNED_OVER * snapshot.turned_over
    places = snapshot.next_seq, snapshot.live_seq, snapshot.digest
    return _HEAD.pack(VERSION, *places, flags) + snapshot.blocks


def decode_snapshot(data: bytes) -> CacheSnapshot:
    """Return the snapshot that `data` contains.

    Its blocks are not checked here, but when they are loaded. Raises ValueError for wrong data,
    with the reason as its text.
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

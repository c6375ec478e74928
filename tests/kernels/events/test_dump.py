"""Tests of damaged dumps of one worker's blocks; `test_history.py` tests intact ones."""

from __future__ import annotations

import contextlib
import struct

import pytest
import xxhash

from tests.kernels.events.event_pool import BLOCK_SIZE, KINDS, Pool, array, tokens


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_damaged_dump_changes_nothing(kind: str) -> None:
    pool = Pool(kind)
    blocks = pool.blocks
    blocks.store(array([5, 6]), None, array([1, 2]))
    blocks.store(array([8]), 7, array([3]))
    blocks.remove(array([8]))
    dump = blocks.dump()
    for place in range(len(dump)):
        broken = bytearray(dump)
        broken[place] ^= 1
        with pytest.raises(ValueError, match="dump of blocks: "):
            blocks.load(broken)
        with pytest.raises(ValueError, match="dump of blocks: "):
            blocks.load(dump[:place])
    assert blocks.dump() == dump
    other = type(blocks)(pool.index, 0, BLOCK_SIZE, "other")
    with pytest.raises(ValueError, match="it is of another model or block size"):
        other.load(dump)
    with pytest.raises(TypeError, match="data must be a buffer of bytes, got int"):
        blocks.load(7)
    assert pool.hits(array([1, 2])) == [2, 2, 2]


def test_garbage_dumps_get_the_same_error() -> None:
    """Garbage in a dump is refused with the same error by the native and the Python form. The
    digest is right here, since the parts are read only then.
    """
    pairs = [Pool(kind).blocks for kind in sorted(KINDS)]
    for each in pairs:
        each.store(array([5, 6]), None, array([1, 2]))
        each.store(array([8, 9]), 7, array([3, 4]))
        each.store_tokens(array([10]), 7, tokens(3, 4), 0, 0, [b"ab"])
        each.remove(array([8]))
    body = pairs[0].dump()[:-8]
    for place in range(8, len(body)):
        for change in (1, 0x80, 0xFF):
            broken = bytearray(body)
            broken[place] ^= change
            whole = bytes(broken) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(broken)))
            seen = []
            for each in pairs:
                with contextlib.suppress(ValueError):
                    each.load(whole)
                    seen.append(each.dump())
            assert len(seen) in (0, 2)
            assert not seen or seen[0] == seen[1], place


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_frozen_copy_does_not_change(kind: str) -> None:
    blocks = Pool(kind).blocks
    blocks.store(array([5, 6]), None, array([1, 2]))
    blocks.store_tokens(array([10]), 7, tokens(3, 4), 0, 0, [b"ab"])
    dump, frozen = blocks.dump(), blocks.frozen()
    blocks.store(array([7]), 6, array([3]))  # wakes what was parked
    blocks.remove(array([5]))
    assert blocks.dump() != dump
    blocks.clear()
    assert frozen.dump() == dump

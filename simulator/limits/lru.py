"""Caches of block ids: one least-recently-used cache, and who of a pool holds what."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class LruCache:
    """The ids of `capacity` blocks at most; None: without limit. Lifetime: one row of a table."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._ids)

    def match(self, ids: Sequence[int]) -> int:
        """Leading ids that are present."""
        present = self._ids
        for depth, block in enumerate(ids):
            if block not in present:
                return depth
        return len(ids)

    def insert(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Touch or add every id from the last to the first, then evict: (added, evicted) ids.

        So a block is always more recent than those behind it, and chains lose their tails first.
        What is longer than the cache stands in both lists.
        """
        present = self._ids
        if self._capacity is None:
            added = [block for block in ids if block not in present]
            present.update(dict.fromkeys(added))
            return added, []
        added = []
        touch = present.move_to_end
        for block in reversed(ids):
            if block in present:
                touch(block)
            else:
                present[block] = None
                added.append(block)
        surplus = len(present) - self._capacity
        return added, [present.popitem(last=False)[0] for _ in range(surplus)]


class Holders:
    """For each id the workers that hold it, as bits: one look-up a block, not one a worker.

    Lifetime: one row of a table. `match` and `insert` of one worker as in `LruCache`.
    """

    def __init__(self, workers: int, capacity: int | None) -> None:
        self._caches = [LruCache(capacity) for _ in range(workers)]
        self._everybody = (1 << workers) - 1
        self._bits: dict[int, int] = {}  # ids that nobody holds are left out

    def longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """(longest match of any worker, bits of the workers that have it)."""
        bits = self._bits
        holders = self._everybody
        for depth, block in enumerate(ids):
            still = holders & bits.get(block, 0)
            if not still:
                return depth, holders
            holders = still
        return len(ids), holders

    def match(self, worker: int, ids: Sequence[int]) -> int:
        """Leading ids that `worker` holds."""
        return self._caches[worker].match(ids)

    def insert(self, worker: int, ids: Sequence[int]) -> None:
        """`worker` computes the blocks of `ids`."""
        bits = self._bits
        bit = 1 << worker
        added, evicted = self._caches[worker].insert(ids)
        for block in added:
            bits[block] = bits.get(block, 0) | bit
        for block in evicted:
            left = bits[block] ^ bit
            if left:
                bits[block] = left
            else:
                del bits[block]

"""Plain-Python twins of the native core: the oracle of its tests and its fallback."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]


def chain_hashes(tokens: npt.ArrayLike, block_size: int, seed: int = 0) -> Hashes:
    """Chain hashes of the full blocks of `tokens` (int32), first block first.

    h_i = XXH3-64(h_{i-1} as 8 little-endian bytes + block i's tokens as int32 little-endian),
    h_{-1} = `seed` (uint64). The partial last block is not hashed. To go on from a known block,
    pass its hash as `seed`. Raises ValueError for block_size < 1 or a seed outside uint64.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be a uint64, got {seed}")
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = 4 * block_size
    chain = np.empty(len(data) // step, dtype=np.uint64)
    for i in range(len(chain)):
        seed = xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + data[i * step : (i + 1) * step])
        chain[i] = seed
    return chain


class PrefixIndex:
    """Exact membership of (worker, block); lifetime: process.

    `workers` slots, numbered from 0. At most `max_entries` distinct blocks: beyond it the block
    whose last store or lookup lies furthest back is forgotten and counted in `evicted`.
    """

    def __init__(self, workers: int, max_entries: int = 1 << 20) -> None:
        if not 1 <= workers <= 4096:
            raise ValueError(f"workers must be 1..4096, got {workers}")
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries}")
        self.workers = workers
        self.max_entries = max_entries
        self.evicted = 0
        self._holders: dict[int, set[int]] = {}  # insertion order = age of last use

    def store(self, worker: int, hashes: Hashes) -> int:
        """Say that `worker` holds these blocks; returns how many it did not hold before."""
        self._check(worker)
        fresh = 0
        for block in map(int, hashes):
            holders = self._holders.pop(block, None)
            if holders is None:
                if len(self._holders) >= self.max_entries:
                    del self._holders[next(iter(self._holders))]
                    self.evicted += 1
                holders = set()
            fresh += worker not in holders
            holders.add(worker)
            self._holders[block] = holders
        return fresh

    def remove(self, worker: int, hashes: Hashes) -> int:
        """Say that `worker` dropped these blocks; returns how many it held."""
        self._check(worker)
        gone = 0
        for block in map(int, hashes):
            holders = self._holders.get(block)
            if holders is not None and worker in holders:
                gone += 1
                holders.discard(worker)
                if not holders:
                    del self._holders[block]
        return gone

    def clear_worker(self, worker: int) -> int:
        """Forget everything of `worker`; returns how many blocks it held."""
        self._check(worker)
        held = [block for block, holders in self._holders.items() if worker in holders]
        return self.remove(worker, np.array(held, dtype=np.uint64))

    def longest_prefix(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """int32[workers]: how many leading blocks of the chain each worker holds."""
        hits = np.zeros(self.workers, dtype=np.int32)
        alive = set(range(self.workers))
        for depth, block in enumerate(map(int, hashes)):
            holders = self._holders.pop(block, None)
            if holders is None:
                break
            self._holders[block] = holders
            alive &= holders
            if not alive:
                break
            hits[list(alive)] = depth + 1
        return hits

    def __len__(self) -> int:
        """Distinct blocks held by at least one worker."""
        return len(self._holders)

    @property
    def memory_bytes(self) -> int:
        """Estimate of the bytes in use."""
        return sum(160 + 32 * len(holders) for holders in self._holders.values())

    def _check(self, worker: int) -> None:
        if not 0 <= worker < self.workers:
            raise IndexError(f"worker must be 0..{self.workers - 1}, got {worker}")

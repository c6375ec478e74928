"""Plain-Python twins of the native core: the oracle of its tests and its fallback."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

Hashes = npt.NDArray[np.uint64]
Hits = npt.NDArray[np.int32]


def chain_hashes(tokens: Buffer, block_size: int, seed: int = 0) -> Hashes:
    """Chain hashes of the full blocks of `tokens`, first block first.

    h_i = XXH3-64(h_{i-1} as 8 little-endian bytes + block i's tokens as int32 little-endian),
    h_{-1} = `seed` (uint64). The partial last block is not hashed. To go on from a known block,
    pass its hash as `seed`. `tokens` is a C-contiguous 1-D buffer of int32, read in place.
    Raises TypeError for another element type or no buffer at all, ValueError for another shape
    or layout, a block_size below 1, or a seed outside uint64.
    """
    block_size, seed = _integer(block_size, "block_size"), _integer(seed, "seed")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be a uint64, got {seed}")
    data = _buffer(tokens, "tokens", "int32").tobytes()
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    step = 4 * block_size
    chain = np.empty(len(data) // step, dtype=np.uint64)
    for i in range(len(chain)):
        seed = xxhash.xxh3_64_intdigest(
            seed.to_bytes(8, "little") + data[i * step : (i + 1) * step]
        )
        chain[i] = seed
    return chain


class PrefixIndex:
    """Exact membership of (worker, block); lifetime: process.

    `workers` slots, numbered from 0. At most `max_entries` distinct blocks: beyond it the coldest
    block is forgotten and counted in `evicted`; here that is the one whose last store or lookup
    lies furthest back, the native index comes close to it with a clock. Hashes are C-contiguous
    1-D buffers of uint64, every value of which is a legal block; a chain may repeat a hash.
    Members raise TypeError and ValueError for hashes as `chain_hashes` does for tokens, and
    IndexError for a worker that is not there.
    """

    def __init__(self, workers: int, max_entries: int = 1 << 20) -> None:
        workers, max_entries = _integer(workers, "workers"), _integer(max_entries, "max_entries")
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries}")
        if not 1 <= workers <= 4096:
            raise ValueError(f"workers must be 1..4096, got {workers}")
        self.workers = workers
        self.max_entries = max_entries
        self.evicted = 0
        self._holders: dict[int, set[int]] = {}  # insertion order = age of last use

    def store(self, worker: int, hashes: Buffer) -> int:
        """Say that `worker` holds these blocks; returns how many it did not hold before."""
        blocks = _buffer(hashes, "hashes", "uint64").tolist()
        worker = self._checked(worker)
        fresh = 0
        for block in blocks:
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

    def remove(self, worker: int, hashes: Buffer) -> int:
        """Say that `worker` dropped these blocks; returns how many it held."""
        blocks = _buffer(hashes, "hashes", "uint64").tolist()
        worker = self._checked(worker)
        return sum(self._drop(worker, block) for block in blocks)

    def clear_worker(self, worker: int) -> int:
        """Forget everything of `worker`; returns how many blocks it held."""
        worker = self._checked(worker)
        held = [block for block, holders in self._holders.items() if worker in holders]
        return sum(self._drop(worker, block) for block in held)

    def longest_prefix(self, hashes: Buffer) -> Hits:
        """int32[workers]: how many leading blocks of the chain each worker holds."""
        hits = np.zeros(self.workers, dtype=np.int32)
        alive = set(range(self.workers))
        for depth, block in enumerate(_buffer(hashes, "hashes", "uint64").tolist()):
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
        """Bytes in use: a rough estimate here, exact in the native index."""
        return sum(160 + 32 * len(holders) for holders in self._holders.values())

    def _drop(self, worker: int, block: int) -> bool:
        holders = self._holders.get(block)
        if holders is None or worker not in holders:
            return False
        holders.discard(worker)
        if not holders:
            del self._holders[block]
        return True

    def _checked(self, worker: int) -> int:
        worker = _integer(worker, "worker")
        if not 0 <= worker < self.workers:
            raise IndexError(f"worker must be 0..{self.workers - 1}, got {worker}")
        return worker


_FORMATS = {"int32": ("il", 4), "uint64": ("QL", 8)}  # struct codes, bytes of one value


def _buffer(values: Buffer, name: str, dtype: str) -> npt.NDArray[Any]:
    """`values` as an array without a copy, refused in the words of the native core."""
    formats, item_bytes = _FORMATS[dtype]
    try:
        view = memoryview(values)
    except TypeError:
        raise TypeError(
            f"{name} must be a buffer of {dtype}, got {type(values).__name__}; "
            f"numpy.array(..., dtype=numpy.{dtype}) makes one"
        ) from None
    code = view.format[1:] if view.format[0] in "<=@" else view.format
    if view.itemsize != item_bytes or len(code) != 1 or code not in formats:
        raise TypeError(
            f"{name} must be a buffer of {dtype}, "
            f"got format '{view.format}' of {view.itemsize} bytes"
        )
    if view.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got {view.ndim}")
    if not view.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous, got a strided view; "
            "numpy.ascontiguousarray(...) copies it"
        )
    return np.asarray(view)


def _integer(value: SupportsIndex, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None

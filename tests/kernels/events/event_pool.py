"""One worker's blocks in the native and in the plain-Python form, each with an index of the same
form.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkernels import EventBatch, HybridWorkers, PrefixIndex, WorkerBlocks
from tests.oracles import index as twins
from tests.oracles import worker_blocks as event_twins

BLOCK_SIZE = 2
KINDS = {
    "native": (PrefixIndex, WorkerBlocks, EventBatch, HybridWorkers),
    "twin": (
        twins.PrefixIndex,
        event_twins.WorkerBlocks,
        event_twins.EventBatch,
        event_twins.HybridWorkers,
    ),
}


class Pool:
    """An index of two workers with the blocks of the second one, and methods that change them."""

    def __init__(self, kind: str, max_parked: int = 65536, counts_copies: bool = False) -> None:
        make_index, make_blocks, self.decode, make_hybrids = KINDS[kind]
        self.index: Any = make_index(2)
        self.blocks: Any = make_blocks(self.index, 1, BLOCK_SIZE, "m", max_parked, counts_copies)
        self.hybrids: Any = make_hybrids(2)

    def apply(self, payload: bytes, placed: tuple[np.ndarray, ...] = ()) -> np.ndarray | None:
        """Apply a batch; return the chain hashes that left the GPU. `placed` gives names and the
        chain hashes that they stand for.
        """
        left: np.ndarray | None = self.blocks.apply(self.decode(payload), *placed)
        return left

    def reused(self, chain: np.ndarray, blocks: int) -> int:
        """Return how many of the chain's first `blocks` blocks an engine can reuse under its cache
        groups.
        """
        self.hybrids.set(1, self.blocks if self.blocks.is_hybrid else None)
        hits = np.array([blocks, blocks], dtype=np.int32)
        self.hybrids.limit(chain, hits, blocks)
        assert hits[0] == blocks, "nobody limits the other worker"
        return int(hits[1])

    def hits(self, chain: np.ndarray) -> list[int]:
        """Return how many leading blocks the worker has in the first tier, in the first two, and in
        all tiers.
        """
        hits: list[int] = self.index.longest_prefix_tiers(chain)[:, 1].tolist()
        return hits


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64 if max(values, default=0) >= 2**31 else np.int32)

"""A `RouterCore` with a few workers for tests, whose prompts are lists of block numbers."""

from __future__ import annotations

import numpy as np

from kvkernels import chain_hashes
from policies.facts import (
    Arrival,
    KvEvents,
    Removed,
    Stored,
    WorkerChange,
    WorkerFacts,
)
from policies.load import load
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore

BLOCK = 4


def tokens_of(blocks: list[int]) -> np.ndarray:
    """Return the tokens of blocks; each block number stands for BLOCK equal tokens."""
    return np.repeat(np.array(blocks, dtype=np.int32), BLOCK)


def chain_of(blocks: list[int]) -> np.ndarray:
    return chain_hashes(tokens_of(blocks), BLOCK)


def names_of(blocks: list[int]) -> tuple[int, ...]:
    """Return the names that the engine gives to blocks: hashes of prefixes that differ
    from ours.
    """
    return tuple(hash(tuple(blocks[: i + 1])) % 2**64 for i in range(len(blocks)))


def stored(blocks: list[int], after: int = 0) -> Stored:
    """Return the event of storing `blocks[after:]`, whose parent is the first `after` blocks."""
    names = names_of(blocks)
    return Stored(
        hashes=names[after:],
        parent=names[after - 1] if after else None,
        tokens=tuple(tokens_of(blocks[after:]).tolist()),
        block_size=BLOCK,
    )


def removed(blocks: list[int], last: int = 1) -> Removed:
    """Return the event of evicting the last `last` blocks of the prefix `blocks`."""
    return Removed(hashes=names_of(blocks)[len(blocks) - last :])


class World:
    """A decision core with its workers and clock. Lifetime: test."""

    def __init__(self, workers: int = 3, policy: str = "hybrid", **settings: object) -> None:
        self.now_s = 0.0
        bounds = CoreSettings(**{"max_workers": 8} | settings)  # type: ignore[arg-type]
        self.core = RouterCore(load(policy), bounds, seed=7)
        self._request_id = 0
        for worker_id in range(workers):
            self.join(worker_id)

    @property
    def next_id(self) -> int:
        """Return the id that the next arriving request will have."""
        return self._request_id + 1

    def join(self, worker_id: int, **facts: object) -> None:
        known = {"name": f"w{worker_id}", "models": ("m",), "block_size": BLOCK} | facts
        spec = WorkerFacts(**known)  # type: ignore[arg-type]
        self.core.on_worker(WorkerChange(self.now_s, worker_id, "ready", spec))

    def arrival(self, blocks: list[int], **fields: object) -> Arrival:
        self._request_id += 1
        known = {
            "now_s": self.now_s,
            "request_id": self._request_id,
            "model": "m",
            "prompt_tokens": len(blocks) * BLOCK,
            "chains": {BLOCK: chain_of(blocks)},
        } | fields
        return Arrival(**known)  # type: ignore[arg-type]

    def events(self, worker_id: int, seq: int, *events: object, source: str = "live") -> list:
        fact = KvEvents(self.now_s, worker_id, seq, tuple(events), source)  # type: ignore[arg-type]
        return self.core.on_kv_events(fact)

    def hits(self, blocks: list[int]) -> list[int]:
        """Return how many blocks of the prefix each worker holds, by its events alone."""
        slots = [w.slot for w in self.core.workers]
        return self.core.caches.index.longest_prefix(chain_of(blocks))[slots].tolist()

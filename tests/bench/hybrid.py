"""The cost of hybrid models' hits, compared with those of dense models.

    python -m tests.bench.hybrid [--json] [--runs N] [--core C]

Both look up the same prompt in the same index; a hybrid lookup lowers the hits to where every cache
group can continue. Worker w of n holds (w + 1) / n of the prompt in full attention. In its window
or state it holds either "its end", as an engine keeps it, or only "its first blocks", so that the
whole prompt is searched in vain. Every figure is the median of N runs on one pinned core.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from kvkernels import (
    EventBatch,
    HybridWorkers,
    PrefixIndex,
    WorkerBlocks,
    chain_hashes,
    chain_seed,
)
from tests.bench.measuring import Row, arguments, median_us, pinned, show

SIZE = 32
WINDOW_TOKENS = 128
KEPT = 4  # blocks that cover the window


class Workers:
    """The workers of one hybrid model, which hold a prompt to different depths. Lifetime: row."""

    def __init__(self, workers: int, blocks: int, kind: str, at_end: bool) -> None:
        self.index = PrefixIndex(workers, 1 << 24)
        self.hybrids = HybridWorkers(workers)
        tokens = np.random.default_rng(1).integers(0, 150_000, blocks * SIZE).astype(np.int32)
        self.chain = chain_hashes(tokens, SIZE, chain_seed("m", None, None))
        self.blocks = []
        for worker in range(workers):
            own = max(2 * KEPT, blocks * (worker + 1) // workers)
            names = [(at << 12) + worker for at in range(own)]
            kept = names[-KEPT:] if at_end else names[:KEPT]
            events = [
                self.stored(1, "full_attention", names, tokens[: own * SIZE].tolist()),
                self.stored(0, kind, kept, [1]),
            ]
            made = WorkerBlocks(self.index, worker, SIZE, "m")
            made.apply(EventBatch(msgspec.msgpack.encode([0.0, events, 0])))
            self.hybrids.set(worker, made)
            self.blocks.append(made)

    @staticmethod
    def stored(group: int, kind: str, names: list[int], tokens: list[int]) -> dict[str, object]:
        """Return a stored event of a group's blocks; tokens that do not match the names make it a
        masked event.
        """
        return {
            "type": "BlockStored", "block_hashes": names, "token_ids": tokens, "block_size": SIZE,
            "group_idx": group, "kv_cache_spec_kind": kind,
            "kv_cache_spec_sliding_window": WINDOW_TOKENS,
        }  # fmt: skip

    def dense(self) -> np.ndarray:
        """Return for each worker how many leading blocks it holds in full attention."""
        return self.index.longest_prefix(self.chain)

    def hybrid(self) -> np.ndarray:
        """Return for each worker how many leading blocks its engine can reuse."""
        hits = self.index.longest_prefix(self.chain)
        self.hybrids.limit(self.chain, hits, len(self.chain))
        return hits


def measure(runs: int) -> Iterator[Row]:
    """Yield a row for each number of workers, length of prompt, kind of cache group, and
    kept part.
    """
    for workers in (8, 64, 1_024):
        for blocks in (32, 256, 2_048):
            for kind in ("sliding_window", "mamba"):
                for at_end in (True, False):
                    world = Workers(workers, blocks, kind, at_end)
                    assert bool((world.hybrid() == KEPT).all()) != at_end
                    dense_us = median_us(world.dense, runs, 100)
                    hybrid_us = median_us(world.hybrid, runs, 100)
                    kept = "its end" if at_end else "its first blocks"
                    what = f"{workers} workers, {blocks} blocks, {kind}, {kept}"
                    bar = round(2 * dense_us, 1)
                    yield Row(what, hybrid_us, "us", bar, {"dense": dense_us})


def main() -> None:
    """Measure the figures and print them."""
    options = arguments(__doc__ or "", runs=15).parse_args()
    pinned(options.core)
    show(measure(options.runs), options.json)


if __name__ == "__main__":
    main()

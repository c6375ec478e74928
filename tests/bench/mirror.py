"""The cost of estimating the cache of a worker that publishes no events, compared with plain
Python.

    python -m tests.bench.mirror [--json] [--runs N]

Chains are as long as a prompt of 32,768 tokens in blocks of 16. Caches hold 32,768 blocks (524,288
tokens) and remember as many more. Figures are medians of the thread's own CPU time, so other load
on the machine does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvkernels import Mirror
from tests.bench.beside_twin import Row, main, median_us
from tests.oracles import mirror as mirror_twin

CHAIN_BLOCKS = 2_048
CACHE_BLOCKS = 32_768
WORKERS = 64


def figures(make: Callable[[int, int], Any], runs: int) -> dict[str, float]:
    """Return the microseconds of each operation of one estimated cache (`Mirror` or its
    plain-Python version).
    """
    chains = list(np.random.default_rng(7).integers(0, 2**64, (runs, CHAIN_BLOCKS), np.uint64))
    roomy = runs * CHAIN_BLOCKS
    mirror = make(WORKERS, 4 * CACHE_BLOCKS + roomy)
    for worker, resident in ((0, CACHE_BLOCKS), (2, CACHE_BLOCKS)):
        mirror.resize(worker, resident, 2 * resident)
    mirror.resize(1, roomy, roomy)
    fill = np.random.default_rng(8).integers(0, 2**64, (32, CHAIN_BLOCKS), np.uint64)
    for chain in fill:  # the third worker's cache is full of blocks that are never used again
        mirror.touch(2, chain)
    eight = [chains[number % 8] for number in range(runs)]
    for chain in eight[:8]:
        mirror.touch(0, chain)
    return {
        "touch, all resident": median_us(lambda _, chain: mirror.touch(0, chain), eight),
        "touch, all new, into free room": median_us(
            lambda _, chain: mirror.touch(1, chain), chains
        ),
        "touch, all new, as many evicted and as many forgotten": median_us(
            lambda _, chain: mirror.touch(2, chain), chains
        ),
        "longest_prefix, 64 workers": median_us(
            lambda _, chain: mirror.longest_prefix(chain), eight
        ),
    }


def memory_bytes_per_block() -> float:
    """Return the bytes per block of a full native `Mirror`, half of whose blocks are resident."""
    mirror = Mirror(WORKERS, 2 * CACHE_BLOCKS)
    empty = mirror.memory_bytes
    mirror.resize(0, CACHE_BLOCKS, 2 * CACHE_BLOCKS)
    for chain in np.random.default_rng(9).integers(0, 2**64, (64, CHAIN_BLOCKS), np.uint64):
        mirror.touch(0, chain)
    return (mirror.memory_bytes - empty) / mirror.remembered(0)


def memory() -> Row:
    """Return the row for the memory per block of a full `Mirror`."""
    return Row("memory, a block remembered", memory_bytes_per_block(), "B")


if __name__ == "__main__":
    main(__doc__, partial(figures, Mirror), partial(figures, mirror_twin.Mirror), memory)

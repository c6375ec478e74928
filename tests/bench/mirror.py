"""What keeping the mirror of a silent worker's cache costs, beside its plain-Python twin.

    python tests/bench/mirror.py [--json] [--runs N]

Chains are as long as a prompt of 32,768 tokens in blocks of 16, caches hold 32,768 blocks (524,288
tokens) and remember as many more. Medians of the thread's own CPU time: neighbours on the machine
do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkernels import Mirror, mirror_twin

CHAIN_BLOCKS = 2_048
CACHE_BLOCKS = 32_768
WORKERS = 64
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Row:
    """One line of the table; `twin` is the plain-Python figure in the same unit."""

    what: str
    value: float
    unit: str
    twin: float | None = None


def median_us(work: Callable[[Hashes], object], chains: list[Hashes]) -> float:
    """Median CPU microseconds of one call, over one call for each chain."""
    took = []
    for chain in chains:
        start_ns = time.thread_time_ns()
        work(chain)
        took.append(time.thread_time_ns() - start_ns)
    return statistics.median(took) / 1e3


def figures(make: Callable[[int, int], Any], runs: int) -> dict[str, float]:
    """Microseconds of each operation of one mirror."""
    chains = list(np.random.default_rng(7).integers(0, 2**64, (runs, CHAIN_BLOCKS), np.uint64))
    roomy = runs * CHAIN_BLOCKS
    mirror = make(WORKERS, 4 * CACHE_BLOCKS + roomy)
    for worker, resident in ((0, CACHE_BLOCKS), (2, CACHE_BLOCKS)):
        mirror.resize(worker, resident, 2 * resident)
    mirror.resize(1, roomy, roomy)
    fill = np.random.default_rng(8).integers(0, 2**64, (32, CHAIN_BLOCKS), np.uint64)
    for chain in fill:  # the third worker's cache is full of what nobody asks for again
        mirror.touch(2, chain)
    eight = [chains[number % 8] for number in range(runs)]
    for chain in eight[:8]:
        mirror.touch(0, chain)
    return {
        "touch, all resident": median_us(lambda chain: mirror.touch(0, chain), eight),
        "touch, all new, into free room": median_us(lambda chain: mirror.touch(1, chain), chains),
        "touch, all new, as many evicted and as many forgotten": median_us(
            lambda chain: mirror.touch(2, chain), chains
        ),
        "longest_prefix, 64 workers": median_us(mirror.longest_prefix, eight),
    }


def memory_bytes_per_block() -> float:
    """Of a full native mirror, half of whose blocks are resident."""
    mirror = Mirror(WORKERS, 2 * CACHE_BLOCKS)
    empty = mirror.memory_bytes
    mirror.resize(0, CACHE_BLOCKS, 2 * CACHE_BLOCKS)
    for chain in np.random.default_rng(9).integers(0, 2**64, (64, CHAIN_BLOCKS), np.uint64):
        mirror.touch(0, chain)
    return (mirror.memory_bytes - empty) / mirror.remembered(0)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    native = figures(Mirror, options.runs)
    twin = figures(mirror_twin.Mirror, min(options.runs, 20))
    rows = [Row(what, value, "us", twin[what]) for what, value in native.items()]
    rows.append(Row("memory, a block remembered", memory_bytes_per_block(), "B"))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        against = f"{row.twin / row.value:8.0f} x twin" if row.twin else ""
        print(f"{row.what:56} {row.value:9.1f} {row.unit:3} {against}")


if __name__ == "__main__":
    main()

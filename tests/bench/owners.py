"""What it costs to keep who uses which block, beside its plain-Python twin.

    python tests/bench/owners.py [--json] [--runs N]

Chains are 2,048 blocks behind a trunk of 300 that all share. Medians of the thread's own CPU time:
neighbours on the machine do not count.
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

from kvkernels import PrefixOwners, prefix_owners_twin

CHAIN_BLOCKS, TRUNK_BLOCKS, NEW_BLOCKS = 2_048, 300, 48
ENTRIES = 1 << 20
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Row:
    """One line of the table; `twin` is the plain-Python figure in the same unit."""

    what: str
    value: float
    unit: str
    twin: float | None = None


def median_us(work: Callable[[int, Hashes], object], chains: list[Hashes]) -> float:
    """Median CPU microseconds of one call, over one call for each chain and its owner."""
    took = []
    for owner, chain in enumerate(chains):
        start_ns = time.thread_time_ns()
        work(owner, chain)
        took.append(time.thread_time_ns() - start_ns)
    return statistics.median(took) / 1e3


def figures(make: Callable[[int], Any], runs: int) -> dict[str, float]:
    """Microseconds of each operation of one table, then of a full one."""
    random = np.random.default_rng(7)
    chains = list(random.integers(0, 2**64, (runs, CHAIN_BLOCKS), np.uint64))
    for chain in chains:
        chain[:TRUNK_BLOCKS] = chains[0][:TRUNK_BLOCKS]
    strangers = list(random.integers(0, 2**64, (runs, CHAIN_BLOCKS), np.uint64))
    room, crowd = make(ENTRIES), make(ENTRIES // 16)
    for number, chain in enumerate(random.integers(0, 2**64, (32, CHAIN_BLOCKS), np.uint64)):
        crowd.claim(chain, 10**6 + number)

    def known(owner: int, chain: Hashes) -> object:
        return room.claim(chain[:-NEW_BLOCKS], owner)

    return {
        "claim, all new behind the trunk": median_us(known, chains),
        "claim, the same again: all of it is warmed": median_us(known, chains),
        "claim, all known": median_us(known, chains),
        "claim, all known but 48": median_us(lambda o, c: room.claim(c, o), chains),
        "shared": median_us(lambda o, c: room.shared(c), chains),
        "owner, all known": median_us(lambda o, c: room.owner(c), chains),
        "owner, nothing known": median_us(lambda o, c: room.owner(c), strangers),
        "claim, all new, as many evicted": median_us(lambda o, c: crowd.claim(c, o), strangers),
    }


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    native = figures(PrefixOwners, options.runs)
    twin = figures(prefix_owners_twin.PrefixOwners, min(options.runs, 20))
    rows = [Row(what, value, "us", twin[what]) for what, value in native.items()]
    table = PrefixOwners(ENTRIES)
    rows.append(Row("memory, a block there is room for", table.memory_bytes / ENTRIES, "B"))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        against = f"{row.twin / row.value:8.0f} x twin" if row.twin else ""
        print(f"{row.what:56} {row.value:9.1f} {row.unit:3} {against}")


if __name__ == "__main__":
    main()

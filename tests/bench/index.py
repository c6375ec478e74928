"""What the native core costs beside its plain-Python twin and beside reading memory once.

    python tests/bench/index.py [--json] [--runs N] [--core C]

Every figure is the median of N runs on one pinned core; native, twin and bound are measured in
the same process, so that their ratios survive a machine of another speed. Chains are as long as
a prompt of 32,768 tokens in blocks of 16. Look-ups rotate over more chains than the caches hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkernels import _native, twins

TOKENS = 32_768
CHAIN_BLOCKS = 2_048
EVENT_BLOCKS = 64  # blocks of one KV event
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Row:
    """One line of the table. `value` is the native figure, `ratio` how it compares."""

    what: str
    value: float
    unit: str
    other: float | None = None  # the same figure of what it is compared with
    against: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times better than `other` (below 1: worse)."""
        if self.other is None:
            return None
        more_is_better = self.unit.endswith("/s")
        return self.value / self.other if more_is_better else self.other / self.value


def median_s(work: Callable[[], object], runs: int, repeat: int = 1) -> float:
    """Median seconds of one call, over `runs` runs of `repeat` calls each."""
    seconds = []
    for _ in range(runs):
        start_s = time.perf_counter()
        for _ in range(repeat):
            work()
        seconds.append((time.perf_counter() - start_s) / repeat)
    return statistics.median(seconds)


def random_chains(count: int, blocks: int = CHAIN_BLOCKS) -> list[Hashes]:
    rng = np.random.default_rng(7)
    return list(rng.integers(0, 2**64, (count, blocks), dtype=np.uint64))


def hash_rows(runs: int) -> Iterator[Row]:
    tokens = np.random.default_rng(7).integers(0, 150_000, TOKENS).astype(np.int32)
    zeros = bytes(tokens.nbytes)
    # memchr for a byte that is not there reads everything once, at the speed of vector loads.
    read_us = 1e6 * median_s(lambda: zeros.find(b"\xff"), runs, 50)
    for block_size in (16, 64):
        what = f"chain_hashes, 32k tokens, block {block_size}"
        native = 1e6 * median_s(
            lambda size=block_size: _native.chain_hashes(tokens, size), runs, 50
        )
        twin = 1e6 * median_s(lambda size=block_size: twins.chain_hashes(tokens, size), runs)
        yield Row(what, native, "us", twin, "twin")
        yield Row(what, native, "us", read_us, "reading once")


def filled(index: Any, chains: list[Hashes], workers: int) -> None:
    """Worker w of n holds the first (w + 1) / n of every chain."""
    for chain, worker in itertools.product(chains, range(workers)):
        index.store(worker, chain[: CHAIN_BLOCKS * (worker + 1) // workers])


def prefix_rows(runs: int) -> Iterator[Row]:
    chains = random_chains(256)
    for workers in (8, 64, 256, 1024):
        native = _native.PrefixIndex(workers)
        filled(native, chains, workers)
        twin = twins.PrefixIndex(workers)
        filled(twin, chains[:2], workers)
        turn = itertools.cycle(chains)
        us = 1e6 * median_s(lambda n=native, t=turn: n.longest_prefix(next(t)), runs, 64)
        twin_us = 1e6 * median_s(lambda t=twin: t.longest_prefix(chains[0]), max(3, runs // 5))
        what = f"longest_prefix, {CHAIN_BLOCKS:,} blocks, {workers} workers"
        yield Row(what, us, "us", twin_us, "twin")


def event_rows(runs: int) -> Iterator[Row]:
    events = random_chains(8_192, EVENT_BLOCKS)
    blocks = EVENT_BLOCKS * len(events)
    for name, workers, max_entries in (
        ("8 workers", 8, 1 << 20),
        ("1024 workers", 1024, 1 << 20),
        ("8 workers, at the bound", 8, blocks // 4),
    ):
        rates = [event_rates(_native, events, workers, max_entries) for _ in range(runs)]
        twin = event_rates(twins, events[:512], workers, max(1, max_entries // 16))
        for i, verb in enumerate(("store", "remove")):
            value = statistics.median(rate[i] for rate in rates)
            yield Row(f"{verb}, events of {EVENT_BLOCKS}, {name}", value, "M/s", twin[i], "twin")


def event_rates(module: Any, events: list[Hashes], workers: int, max_entries: int) -> list[float]:
    """Million blocks per second stored in a fresh index, then removed."""
    index = module.PrefixIndex(workers, max_entries)
    rates = []
    for verb in (index.store, index.remove):
        start_s = time.perf_counter()
        for serial, event in enumerate(events):
            verb(serial % workers, event)
        rates.append(EVENT_BLOCKS * len(events) / (time.perf_counter() - start_s) / 1e6)
    return rates


def memory_rows() -> Iterator[Row]:
    blocks = np.concatenate(random_chains(64))
    for workers in (8, 64, 256, 1024):
        full = _native.PrefixIndex(workers, max_entries=len(blocks))
        full.store(0, blocks)
        bare = 8 + workers / 8  # the hash and one bit a worker
        per_block = full.memory_bytes / len(full)
        yield Row(f"memory, {workers} workers", per_block, "B/block", bare, "hash + bits")


def measure(runs: int) -> Iterator[Row]:
    yield from hash_rows(runs)
    yield from prefix_rows(runs)
    yield from event_rows(max(3, runs // 5))
    yield from memory_rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--runs", type=int, default=15, help="runs a median is taken over")
    parser.add_argument("--core", type=int, help="core to stay on (default: the last allowed)")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        core = max(os.sched_getaffinity(0)) if options.core is None else options.core
        os.sched_setaffinity(0, {core})
    rows = measure(options.runs)
    if options.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2))
        return
    for row in rows:
        compared = f"{row.ratio:8.2f} x {row.against} ({row.other:,.2f})" if row.ratio else ""
        print(f"{row.what:48} {row.value:10,.2f} {row.unit:8} {compared}", flush=True)


if __name__ == "__main__":
    main()

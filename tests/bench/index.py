"""The cost of hashing and of the prefix index, compared with their plain-Python versions and
Dynamo.

    python tests/bench/index.py [--json] [--runs N] [--core C] [--blocks N] [--dynamo PYTHON]

Every figure is the median of N runs on one pinned core. Chains are as long as a prompt of 32,768
tokens in blocks of 16. The bench looks up either the same prompt again and again, as for Dynamo, or
256 prompts in turn, more than the processor's caches hold.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkernels import _native
from tests.bench.measuring import Row, arguments, beside, median_us, peer_figures, pinned, show
from tests.oracles import index as twins

TOKENS = 32_768
CHAIN_BLOCKS = 2_048
CHAINS = 256
EVENT_BLOCKS = 64  # blocks of one KV event
Hashes = npt.NDArray[np.uint64]
Peer = Mapping[str, float]


def random_chains(count: int, blocks: int = CHAIN_BLOCKS, seed: int = 7) -> list[Hashes]:
    """Return random chains of block hashes that share no block."""
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 2**64, (count, blocks), dtype=np.uint64))


def hash_rows(runs: int, peer: Peer) -> Iterator[Row]:
    """Yield rows for the chain hashes of a prompt in a buffer; Dynamo takes a list."""
    tokens = np.random.default_rng(7).integers(0, 150_000, TOKENS).astype(np.int32)
    zeros = bytes(tokens.nbytes)
    # memchr for a missing byte reads everything once, at the speed of vector loads.
    read_us = median_us(lambda: zeros.find(b"\xff"), runs, 50)
    for block_size, bar in ((16, 60.0), (64, None)):
        native = median_us(lambda size=block_size: _native.chain_hashes(tokens, size), runs, 50)
        twin = median_us(
            lambda size=block_size: twins.chain_hashes(tokens, size), max(3, runs // 5)
        )
        others = {"twin": twin, "reading once": read_us}
        others |= beside(peer, "hash_us") if block_size == 16 else {}
        yield Row(f"hash 32k tokens, block {block_size}", native, "us", bar, others)


def staggered(index: Any, chains: list[Hashes], workers: int) -> None:
    """Fill the index so that worker w of n holds the first (w + 1) / n of every chain."""
    for chain, worker in itertools.product(chains, range(workers)):
        index.store(worker, chain[: CHAIN_BLOCKS * (worker + 1) // workers])


def whole(index: Any, chains: list[Hashes], workers: int) -> None:
    """Fill the index so that every worker holds every chain."""
    for chain, worker in itertools.product(chains, range(workers)):
        index.store(worker, chain)


def mottled(index: Any, chains: list[Hashes], workers: int) -> None:
    """Fill the index so that a random half of the workers, and worker 0, hold each block."""
    rng = np.random.default_rng(5)
    for chain in chains:
        index.store(0, chain)
        for worker in range(1, workers):
            index.store(worker, chain[rng.random(len(chain)) < 0.5])


def split(index: Any, chains: list[Hashes], workers: int) -> None:
    """Fill the index so that every worker holds every chain, and another prompt branches off at
    every block.
    """
    whole(index, chains, workers)
    for number, chain in enumerate(chains):
        branches = np.random.default_rng(number).integers(0, 2**64, len(chain), dtype=np.uint64)
        for depth in range(len(chain)):
            index.store(depth % workers, branches[depth : depth + 1])


def scattered(index: Any, chains: list[Hashes], workers: int) -> None:
    """Fill the index so that eight workers anywhere in the pool hold each chain."""
    rng = np.random.default_rng(5)
    for chain in chains:
        for worker in rng.choice(workers, 8, replace=False).tolist():
            index.store(worker, chain)


def prefix_rows(runs: int, peer: Peer) -> Iterator[Row]:
    """Yield rows for `longest_prefix` of 2,048 blocks in indexes of several shapes."""
    for what, workers, fill, bar, figure in (
        ("64 workers hold all", 64, whole, 40.0, "prefix_us"),
        ("64 workers, split at every block", 64, split, 60.0, "split_us"),
        ("64 workers, each block held by others", 64, mottled, 60.0, ""),
        ("64 workers, each some way", 64, staggered, None, ""),
        ("4,096 workers, 8 holders", 4_096, scattered, 120.0, ""),
        ("1,024 workers, each some way", 1_024, staggered, None, ""),
    ):
        chains = random_chains(CHAINS if workers == 64 else CHAINS // 4)
        native = _native.PrefixIndex(workers)
        fill(native, chains, workers)
        twin = twins.PrefixIndex(workers)
        fill(twin, chains[:1], workers)
        twin_us = median_us(lambda t=twin, c=chains[0]: t.longest_prefix(c), max(3, runs // 5))
        hot_us = median_us(lambda n=native, c=chains[0]: n.longest_prefix(c), runs, 64)
        others = {"twin": twin_us} | beside(peer, figure)
        yield Row(f"longest_prefix, {what}", hot_us, "us", bar, others)
        turn = itertools.cycle(chains)
        cold_us = median_us(lambda n=native, t=turn: n.longest_prefix(next(t)), runs, 64)
        yield Row(f"  {len(chains)} prompts in turn", cold_us, "us", bar)
    native = _native.PrefixIndex(64)
    whole(native, random_chains(CHAINS), 64)
    turn = itertools.cycle(random_chains(CHAINS, seed=8))
    miss_us = median_us(lambda: native.longest_prefix(next(turn)), runs, 64)
    others = beside(peer, "miss_us")
    yield Row("longest_prefix, miss at the first block", miss_us, "us", 2.0, others)


def store_rows(runs: int) -> Iterator[Row]:
    """Yield rows for how many blocks the index stores and removes a second, event by event."""
    events = random_chains(8_192, EVENT_BLOCKS)
    blocks = EVENT_BLOCKS * len(events)
    for name, workers, max_entries in (
        ("8 workers", 8, 1 << 20),
        ("1,024 workers", 1_024, 1 << 20),
        ("8 workers, at the bound", 8, blocks // 4),
    ):
        rates = [event_rates(_native, events, workers, max_entries) for _ in range(runs)]
        twin = event_rates(twins, events[:512], workers, max(1, max_entries // 16))
        for i, verb in enumerate(("store", "remove")):
            value = statistics.median(rate[i] for rate in rates)
            what = f"{verb}, {EVENT_BLOCKS} blocks a call, {name}"
            yield Row(what, value, "M/s", 8.0 if verb == "store" else None, {"twin": twin[i]})


def event_rates(module: Any, events: list[Hashes], workers: int, max_entries: int) -> list[float]:
    """Return two rates in million blocks for each second of CPU time: of storing in a fresh index,
    and of removing afterwards.
    """
    index = module.PrefixIndex(workers, max_entries)
    rates = []
    for verb in (index.store, index.remove):
        start_s = time.process_time()
        for serial, event in enumerate(events):
            verb(serial % workers, event)
        rates.append(EVENT_BLOCKS * len(events) / (time.process_time() - start_s) / 1e6)
    return rates


def memory_rows() -> Iterator[Row]:
    """Yield the row for the bytes per block with 4,096 slots, the greatest while the index is at
    least a quarter full.
    """
    chains = random_chains(256)
    bound = CHAIN_BLOCKS * len(chains)
    slots = np.random.default_rng(3).choice(4_096, 64, replace=False).tolist()
    for what, holders, bar in (
        ("one holder", [7], 48.0),
        ("64 holders, side by side", list(range(64)), 160.0),
        ("64 holders, scattered", slots, 160.0),
    ):
        index = _native.PrefixIndex(4_096, max_entries=bound)
        worst = 0.0
        for number, chain in enumerate(chains):
            for worker in holders:
                index.store(worker, chain)
            if 4 * (number + 1) >= len(chains):
                worst = max(worst, index.memory_bytes / len(index))
        yield Row(f"memory, {what}", worst, "B/block", bar)


def restart_rows(blocks: int) -> Iterator[Row]:
    """Yield the time to dump an index of many blocks to bytes and to load it."""
    index = _native.PrefixIndex(64, max_entries=blocks)
    rng = np.random.default_rng(2)
    probe = rng.integers(0, 2**64, CHAIN_BLOCKS, dtype=np.uint64)
    index.store(3, probe)
    for worker in range(64):
        index.store(worker, rng.integers(0, 2**64, blocks // 64, dtype=np.uint64))
    start_s = time.perf_counter()
    data = index.dump()
    dumped_s = time.perf_counter()
    again = _native.PrefixIndex.load(data)
    loaded_s = time.perf_counter()
    same = (again.longest_prefix(probe) == index.longest_prefix(probe)).all()
    assert same, "a look-up differs after dump and load"
    millions = f"{len(index) / 1e6:.0f} M blocks"
    yield Row(f"dump of {millions}", dumped_s - start_s, "s", 10.0)
    yield Row(f"load of {millions}", loaded_s - dumped_s, "s", 10.0)


def clear_rows(blocks: int) -> Iterator[Row]:
    """Yield the time to forget one of 64 workers in an index of many blocks."""
    index = _native.PrefixIndex(64, max_entries=blocks)
    rng = np.random.default_rng(2)
    for worker in range(64):
        index.store(worker, rng.integers(0, 2**64, blocks // 64, dtype=np.uint64))
    taken = []
    for worker in range(32):
        start_s = time.perf_counter()
        index.clear_worker(worker)
        taken.append(time.perf_counter() - start_s)
    yield Row(f"clear_worker, {blocks / 1e6:.0f} M blocks", statistics.median(taken) * 1e6, "us")


def measure(runs: int, blocks: int, peer: Peer) -> Iterator[Row]:
    """Yield the rows of all measurements."""
    yield from hash_rows(runs, peer)
    yield from prefix_rows(runs, peer)
    yield from store_rows(max(3, runs // 5))
    yield from memory_rows()
    yield from restart_rows(blocks)
    yield from clear_rows(blocks)


def main() -> None:
    """Measure the figures and print them."""
    parser = arguments(__doc__ or "", runs=15)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="of the index dumped")
    options = parser.parse_args()
    core = pinned(options.core)
    peer = peer_figures(options.dynamo, core)
    show(measure(options.runs, options.blocks, peer), options.json)


if __name__ == "__main__":
    main()

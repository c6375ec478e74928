"""Tests of the limits of the prefix index: entries, bytes, memory per block, and consistent answers
to several threads.
"""

import threading

import numpy as np
import pytest

from kvkernels import PrefixIndex


def unique(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**63, count).astype(np.uint64)


def test_a_block_in_use_is_not_evicted() -> None:
    """A block that is looked up between any two evictions stays in the index, because the clock
    algorithm gives it a second chance.
    """
    index = PrefixIndex(1, max_entries=1000)
    trunk = np.arange(50, dtype=np.uint64)
    index.store(0, trunk)
    for start in range(1000, 21_000, 100):
        index.store(0, np.arange(start, start + 100, dtype=np.uint64))
        assert index.longest_prefix(trunk).tolist() == [50], start
    assert len(index) == 1000
    assert index.evicted == 20_000 + 50 - 1000


def test_evicted_blocks_are_counted_for_each_worker_that_held_them() -> None:
    rng = np.random.default_rng(7)
    blocks = unique(3000)
    index = PrefixIndex(4, max_entries=700)
    stored = [0] * 4
    for start in range(0, len(blocks), 100):
        for worker in rng.choice(4, size=rng.integers(1, 4), replace=False).tolist():
            tier = int(rng.integers(0, 2))
            stored[worker] += index.store(worker, blocks[start : start + 100], tier)
            stored[worker] -= index.remove(worker, blocks[start : start + 3], tier)
        held = [index.held(worker) + index.held(worker, 1) for worker in range(4)]
        lost = [index.evicted_of(worker) for worker in range(4)]
        assert [a + b for a, b in zip(held, lost, strict=True)] == stored
    assert min(lost) > 0
    index.clear_worker(2)
    assert [index.evicted_of(worker) for worker in range(4)] == [*lost[:2], 0, lost[3]]
    index.clear_worker(2)  # it holds nothing, so nothing of it can be evicted
    index.store(0, unique(700, seed=4))
    assert (index.evicted_of(2), index.evicted_of(0) > lost[0]) == (0, True)
    with pytest.raises(IndexError, match=r"worker must be 0\.\.3, got 4"):
        index.evicted_of(4)


def test_cleared_workers_make_room_before_anything_is_evicted() -> None:
    index = PrefixIndex(2, max_entries=100)
    for start in range(0, 2000, 100):
        chain = np.arange(start, start + 100, dtype=np.uint64)
        index.store(0, chain)
        assert index.longest_prefix(chain).tolist() == [100, 0]
        index.clear_worker(0)
    assert index.evicted == 0


@pytest.mark.parametrize("workers", [64, 4096])
def test_a_unique_block_takes_at_most_48_bytes(workers: int) -> None:
    """A block takes at most 48 bytes once the index is at least a quarter full, and an empty index
    is small.
    """
    blocks = unique(1 << 17)
    index = PrefixIndex(workers, max_entries=len(blocks))
    assert index.memory_bytes < 200 * workers + 4096
    for start in range(0, len(blocks), 4096):
        index.store(0, blocks[start : start + 4096])
        if start >= len(blocks) // 4:
            assert index.memory_bytes <= 48 * len(index)
    assert index.evicted == 0


@pytest.mark.parametrize(("step", "most_bytes"), [(1, 80), (63, 180)], ids=["dense", "scattered"])
def test_memory_of_a_block_on_64_workers_is_bounded(step: int, most_bytes: int) -> None:
    blocks = unique(1 << 15)
    index = PrefixIndex(4096, max_entries=1 << 15)
    for worker in range(64):
        index.store(worker * step, blocks)
    assert index.memory_bytes <= most_bytes * len(blocks)
    for worker in range(64):
        index.remove(worker * step, blocks)
    assert len(index) == 0
    index.store(0, blocks)
    assert index.memory_bytes <= 50 * len(blocks)  # the sets' memory was given back


@pytest.mark.parametrize("holders", [1, 12])
def test_a_bound_in_bytes_is_kept(holders: int) -> None:
    index = PrefixIndex(2000, max_bytes=1 << 20)
    for turn in range(60):
        blocks = unique(1000, seed=turn)
        for worker in range(holders):
            index.store(worker * 150, blocks)
        assert index.memory_bytes < 1.2 * (1 << 20) + 100_000
    assert index.evicted > 0
    assert len(index) > (1 << 20) // (40 + 50 * (holders > 4))


def test_deletion_neither_grows_the_table_nor_loses_blocks() -> None:
    """Storing and removing at constant size neither makes the table grow nor loses a block."""
    index = PrefixIndex(1)
    window = np.arange(1000, dtype=np.uint64)
    index.store(0, window)
    before = index.memory_bytes
    for step in range(1, 200):
        index.remove(0, window[:500] + np.uint64((step - 1) * 500))
        index.store(0, window[500:] + np.uint64(step * 500))
        assert len(index) == 1000
    assert index.longest_prefix(window + np.uint64(199 * 500)).tolist() == [1000]
    assert index.memory_bytes <= 1.5 * before


def test_threads_share_one_index() -> None:
    index = PrefixIndex(8, max_entries=1 << 16)
    rng = np.random.default_rng(11)
    chains_of = [rng.integers(0, 2**63, 2000).astype(np.uint64) for _ in range(8)]
    errors: list[str] = []

    def live(worker: int) -> None:
        chain = chains_of[worker]
        for cut in range(0, 2000, 50):
            index.store(worker, chain)
            if index.longest_prefix(chain)[worker] != 2000:
                errors.append(f"worker {worker} lost its own chain")
            index.remove(worker, chain[cut:])
            if index.longest_prefix(chain)[worker] != cut:
                errors.append(f"worker {worker} holds more than {cut} blocks")

    threads = [threading.Thread(target=live, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(index) == 8 * 1950


def test_lookups_beside_a_writer_are_never_torn() -> None:
    """A lookup during a write sees an event of 500 blocks either completely or not at all."""
    chain = unique(2000)
    index = PrefixIndex(4, max_entries=1 << 16)
    index.store(1, chain)
    stop = threading.Event()
    seen: set[tuple[int, ...]] = set()

    def look() -> None:
        while not stop.is_set():
            seen.add(tuple(index.longest_prefix(chain).tolist()))

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(100):
        for start in range(0, 2000, 500):
            index.store(0, chain[start : start + 500])
        index.store(2, chain[:700])
        index.clear_worker(2)
        for start in range(1500, -1, -500):
            index.remove(0, chain[start : start + 500])
    stop.set()
    for reader in readers:
        reader.join()
    assert {hits[0] for hits in seen} <= {0, 500, 1000, 1500, 2000}
    assert {hits[1] for hits in seen} <= {2000}
    assert {hits[2] for hits in seen} <= {0, 700}
    assert seen

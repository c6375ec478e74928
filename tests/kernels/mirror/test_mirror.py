"""Tests of the native estimate of caches (`Mirror`): it agrees with its Python version over random
histories and keeps its promises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvkernels import Mirror
from tests.effort import examples
from tests.kernels.histories import garbage, hashes, paths
from tests.oracles import mirror as mirror_twin

MAX_BLOCKS = 60
WORKERS = 3

Either = type[Mirror] | type[mirror_twin.Mirror]
both = pytest.mark.parametrize("kind", [Mirror, mirror_twin.Mirror], ids=["native", "twin"])


workers = st.integers(0, WORKERS - 1)


class NativeAndPythonMachine(RuleBasedStateMachine):
    """Checks that every answer of the native `Mirror` equals the Python version's for any input."""

    @initialize()
    def start(self) -> None:
        self.pair: tuple[Any, Any] = (
            Mirror(WORKERS, MAX_BLOCKS),
            mirror_twin.Mirror(WORKERS, MAX_BLOCKS),
        )
        self.touches: list[tuple[int, list[int], int]] = []
        self.seen: list[list[int]] = []

    def same_answer(self, ask: Callable[[Any], Any]) -> Any:
        native, twin = (ask(mirror) for mirror in self.pair)
        assert native == twin
        return native

    @rule(worker=workers, resident=st.integers(0, 20), more=st.integers(0, 20))
    def resize(self, worker: int, resident: int, more: int) -> None:
        def resized(mirror: Any) -> int | str:
            try:
                return int(mirror.resize(worker, resident, resident + more))
            except ValueError as error:
                return str(error)

        self.same_answer(resized)

    @rule(worker=workers, chain=paths | garbage)
    def touch(self, worker: int, chain: list[int]) -> None:
        _, stamp, _ = self.same_answer(lambda mirror: mirror.touch(worker, hashes(chain)))
        self.touches.append((worker, chain, stamp))
        self.seen.append(chain)

    @precondition(lambda self: self.touches)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        worker, chain, stamp = data.draw(st.sampled_from(self.touches))
        self.same_answer(lambda mirror: mirror.forget(worker, hashes(chain), stamp))

    @precondition(lambda self: self.touches)
    @rule(worker=workers, data=st.data())
    def drop_colder(self, worker: int, data: st.DataObject) -> None:
        stamp = data.draw(st.sampled_from(self.touches))[2]
        self.same_answer(lambda mirror: mirror.drop_colder(worker, stamp))

    @precondition(lambda self: self.touches)
    @rule(worker=workers, data=st.data())
    def revive_warmer(self, worker: int, data: st.DataObject) -> None:
        stamp = data.draw(st.sampled_from(self.touches))[2]
        self.same_answer(lambda mirror: mirror.revive_warmer(worker, stamp))

    @rule(worker=workers)
    def clear_worker(self, worker: int) -> None:
        self.same_answer(lambda mirror: mirror.clear_worker(worker))

    @precondition(lambda self: hasattr(self, "pair"))
    @invariant()
    def same_state(self) -> None:
        self.same_answer(len)
        for worker in range(WORKERS):
            held = self.same_answer(methodcaller("held", worker))
            remembered = self.same_answer(methodcaller("remembered", worker))
            assert held <= remembered <= MAX_BLOCKS
        asked = self.seen + [[block] for chain in self.seen for block in set(chain)]
        for chain in asked:
            native, twin = (mirror.longest_prefix(hashes(chain)) for mirror in self.pair)
            raised = np.full_like(twin, 2)
            self.pair[0].raise_prefix(hashes(chain), raised)
            np.testing.assert_array_equal(raised, np.maximum(twin, 2))
            assert native.tolist() == twin.tolist()


NativeAndPythonMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestNativeAndPythonMachine = NativeAndPythonMachine.TestCase


def sized(kind: Either, resident: int, remembered: int | None = None, workers: int = 1) -> Any:
    mirror = kind(workers, 1 << 16)
    for worker in range(workers):
        mirror.resize(worker, resident, remembered or 2 * resident)
    return mirror


@both
def test_leaves_are_evicted_before_parents_and_the_coldest_chain_first(kind: Either) -> None:
    mirror = sized(kind, 6)
    mirror.touch(0, hashes([1, 2, 3]))
    mirror.touch(0, hashes([1, 12, 13]))
    mirror.touch(0, hashes([21, 22]))
    assert mirror.longest_prefix(hashes([1, 2, 3])).tolist() == [2]
    assert mirror.longest_prefix(hashes([1, 12, 13])).tolist() == [3]
    mirror.touch(0, hashes([31, 32, 33]))
    assert mirror.longest_prefix(hashes([1, 2, 3])).tolist() == [1]
    assert mirror.longest_prefix(hashes([1, 12, 13])).tolist() == [1]
    assert (mirror.held(0), mirror.remembered(0)) == (6, 10)


@both
def test_a_touch_returns_the_last_use_of_each_part(kind: Either) -> None:
    mirror = sized(kind, 10)
    mirror.touch(0, hashes([1, 2, 3, 4]))
    mirror.touch(0, hashes([1, 2]))
    assert mirror.touch(0, hashes([1, 2, 3, 4, 5])) == (4, 3, [(2, 2), (4, 1)])
    assert mirror.touch(0, hashes([9, 8])) == (0, 4, [])
    assert mirror.touch(0, hashes([])) == (0, 5, [])


@both
def test_a_touch_returns_at_most_32_runs(kind: Either) -> None:
    mirror = sized(kind, 100)
    chain = hashes(list(range(1, 51)))
    for depth in range(50, 0, -1):
        mirror.touch(0, chain[:depth])
    hit_blocks, _, runs = mirror.touch(0, chain)
    assert hit_blocks == 50
    assert runs == [(depth, 51 - depth) for depth in range(1, 33)]


@both
def test_a_chain_longer_than_the_cache_keeps_its_first_blocks(kind: Either) -> None:
    mirror = sized(kind, 4)
    mirror.touch(0, hashes([9]))
    mirror.touch(0, hashes([1, 2, 3, 4, 5, 6]))
    assert mirror.longest_prefix(hashes([1, 2, 3, 4, 5, 6])).tolist() == [4]
    assert mirror.longest_prefix(hashes([9])).tolist() == [0]


@both
def test_undoing_a_touch_keeps_blocks_that_later_touches_use(kind: Either) -> None:
    mirror = sized(kind, 10)
    mirror.touch(0, hashes([1, 2]))
    _, failed, _ = mirror.touch(0, hashes([1, 2, 3, 4, 5]))
    mirror.touch(0, hashes([1, 2, 3]))
    assert mirror.forget(0, hashes([3, 4, 5]), failed) == 2
    assert mirror.longest_prefix(hashes([1, 2, 3, 4])).tolist() == [3]
    assert mirror.remembered(0) == 3


@both
def test_dropped_blocks_are_remembered_and_revived_in_order(kind: Either) -> None:
    mirror = sized(kind, 10)
    stamps = [mirror.touch(0, hashes([n, n + 1]))[1] for n in (10, 20, 30)]
    assert mirror.drop_colder(0, stamps[1]) == 4
    assert (mirror.held(0), mirror.remembered(0)) == (2, 6)
    assert mirror.revive_warmer(0, stamps[0]) == 2
    assert mirror.longest_prefix(hashes([20, 21])).tolist() == [2]
    assert mirror.longest_prefix(hashes([10, 11])).tolist() == [0]
    mirror.resize(0, 5, 20)
    assert mirror.revive_warmer(0, 0) == 1


@both
def test_the_remembered_blocks_of_all_workers_are_bounded(kind: Either) -> None:
    mirror = kind(2, 100)
    mirror.resize(0, 30, 60)
    with pytest.raises(ValueError, match="remembered must be at most 40"):
        mirror.resize(1, 30, 41)
    mirror.resize(0, 30, 30)
    mirror.resize(1, 70, 70)


@both
def test_all_workers_are_looked_up_in_one_pass(kind: Either) -> None:
    mirror = sized(kind, 50, workers=70)
    chain = hashes(list(range(1, 41)))
    for worker in range(70):
        mirror.touch(worker, chain[: worker % 41])
    wanted = [worker % 41 for worker in range(70)]
    assert mirror.longest_prefix(chain).tolist() == wanted
    assert len(mirror) == 40
    assert mirror.clear_worker(40) == 40
    assert mirror.longest_prefix(chain)[40] == 0
    mirror.touch(40, chain[:3])  # the slot may be used again at once
    assert mirror.longest_prefix(chain)[40] == 3


@both
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m.touch(7, hashes([1])), IndexError, "worker must be 0..1, got 7"),
        (lambda m: m.held(-1), IndexError, "worker must be 0..1, got -1"),
        (lambda m: m.touch(0, [1, 2]), TypeError, "chain must be a buffer of uint64, got list"),
        (lambda m: m.resize(0, 5, 4), ValueError, "resident must be 0..remembered, got 5 of 4"),
        (lambda m: m.resize(0, "5", 4), TypeError, "resident must be an int, got str"),
        (lambda m: m.drop_colder(0, -1), ValueError, "stamp must be a uint64, got -1"),
        (lambda m: type(m)(1, 0), ValueError, "max_blocks must be 1..2147483648, got 0"),
        (lambda m: type(m)(0, 1), ValueError, "workers must be 1..4096, got 0"),
    ],
)
def test_invalid_arguments_are_refused(
    kind: Either, call: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        call(kind(2, 100))
    assert words in str(caught.value)


def test_memory_is_counted_bounded_and_freed() -> None:
    mirror = Mirror(64, 1 << 18)
    empty = mirror.memory_bytes
    assert empty < 16_384
    mirror.resize(0, 50_000, 100_000)
    for start in range(0, 1_000_000, 1000):
        mirror.touch(0, np.arange(start, start + 1000, dtype=np.uint64))
    assert (mirror.held(0), mirror.remembered(0)) == (50_000, 100_000)
    # A record takes 24 bytes in a table at least a third full; the index has the resident blocks.
    assert mirror.memory_bytes - empty < 101_000 * (24 + 24) + 50_000 * 64
    mirror.clear_worker(0)
    assert mirror.remembered(0) == 0


def test_threads_share_one_mirror() -> None:
    mirror = sized(Mirror, 3000, workers=8)
    errors: list[str] = []

    def live(worker: int) -> None:
        chain = np.random.default_rng(worker).integers(1, 2**63, 2000).astype(np.uint64)
        for _ in range(40):
            _, stamp, _ = mirror.touch(worker, chain)
            if mirror.longest_prefix(chain)[worker] != 2000:
                errors.append(f"worker {worker} lost its own chain")
            mirror.forget(worker, chain[500:], stamp)
            if mirror.longest_prefix(chain)[worker] != 500:
                errors.append(f"worker {worker} holds more than 500 blocks")

    threads = [threading.Thread(target=live, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(mirror) == 8 * 500

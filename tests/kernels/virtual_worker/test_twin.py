"""Tests that the native virtual worker never differs from the plain-Python one over random
histories.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import kvkernels
from tests.effort import examples
from tests.kernels.virtual_worker.virtual_pair import TIGHT, Pair, Twin, chain_of

NATIVE = cast(type[Twin], kvkernels.VirtualWorker)

# Pools from the size of one sequence to one that is never full, blocks from one token on, and each
# rule of admission by itself.
VARIATIONS: dict[str, list[Any]] = {
    "blocks": [8, 14, 40, 200],
    "block_size": [1, 3, 4, 16],
    "max_batch_size": [1, 3, 5, 24],
    "max_model_tokens": [30, 60, 300],
    "min_chunk_tokens": [1, 4, 24],
    "watermark": [0.0, 0.1, 0.5],
    "ageing_s": [0.01, 0.05, 10.0],
    "max_queue": [2, 12],
    "prefix_wait_tokens": [0, 4, 8, 40],
    "record_events": [True, True, True, False],
    "host_blocks": [0, 3, 12, 100],
    "load_block_s": [0.0, 0.0001, 0.03],
}
# Groups of windows and states, which exclude a host tier; the pool has room beside them.
GROUPS = [((5, 1),), ((9, 2),), ((0, 3),), ((4, 1), (0, 2)), ((0, 1), (17, 1))]
SPEEDS = [0.5, 1.0, 3.7]


CALLS = ["clear", "abort", "snapshot", "host_blocks", "group_blocks", "advance"]


class TwinMachine(RuleBasedStateMachine):
    """Runs nested prefixes, chunks, preemptions, cancels, clears, deaths and changes of speed at
    any time: within steps, within runs of steps, and at the same nanosecond.
    """

    fixed: ClassVar[dict[str, Any]] = {}  # options that no example changes

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(NATIVE, **TIGHT)
        self.requests = 0

    @initialize(
        changes=st.fixed_dictionaries(
            {}, optional={name: st.sampled_from(values) for name, values in VARIATIONS.items()}
        )
    )
    def configure(self, changes: dict[str, Any]) -> None:
        self.pair = Pair(NATIVE, **(TIGHT | changes | self.fixed))

    @rule(
        trunk=st.integers(0, 2),
        depth=st.integers(0, 8),
        branches=st.lists(st.integers(0, 1), max_size=6),
        prompt_tokens=st.integers(0, 70),
        output_tokens=st.integers(0, 40),
        priority=st.integers(-1, 2),
        legs=st.sampled_from([(False, False)] * 3 + [(True, False), (False, True), (True, True)]),
    )
    def arrive(
        self,
        trunk: int,
        depth: int,
        branches: list[int],
        prompt_tokens: int,
        output_tokens: int,
        priority: int,
        legs: tuple[bool, bool],
    ) -> None:
        chain = chain_of([trunk] * depth + branches)
        self.pair.add(self.requests, chain, prompt_tokens, output_tokens, priority, legs=legs)
        self.requests += 1

    @rule(place=st.integers(0, 20), arrived=st.booleans())
    def end_read(self, place: int, arrived: bool) -> None:
        self.pair.end_read(place, arrived)

    @rule(place=st.integers(0, 20))
    def release(self, place: int) -> None:
        self.pair.release(place)

    @rule(wait_ns=st.integers(0, 200_000_000))
    def wait(self, wait_ns: int) -> None:
        self.pair.run_until(self.pair.now_ns + wait_ns)
        self.pair.compare()

    @rule(events=st.integers(1, 5))
    def let_happen(self, events: int) -> None:
        for _ in range(events):
            self.pair.run_until(max(self.pair.now_ns, self.pair.native.next_ns()))

    @rule(back=st.integers(1, 12))
    def cancel(self, back: int) -> None:
        self.pair.at("cancel", max(0, self.requests - back))

    @rule(call=st.sampled_from(CALLS))
    def interfere(self, call: str) -> None:
        self.pair.at(call)

    @rule(speed=st.sampled_from(SPEEDS))
    def change_speed(self, speed: float) -> None:
        self.pair.at("set_speed", speed)

    @rule(trunk=st.integers(0, 2), depth=st.integers(0, 9))
    def ask(self, trunk: int, depth: int) -> None:
        self.pair.both("hit_blocks", chain_of([trunk] * depth))

    def teardown(self) -> None:
        """Assert that both workers finish all remaining requests alike."""
        self.pair.at("snapshot")
        self.pair.at("host_blocks")
        self.pair.at("group_blocks")
        self.pair.drain()


class HybridTwinMachine(TwinMachine):
    """Runs the same actions with sliding windows and states."""

    fixed: ClassVar[dict[str, Any]] = {"blocks": 40, "block_size": 4, "host_blocks": 0}

    @initialize(groups=st.sampled_from(GROUPS))
    def configure_groups(self, groups: Any) -> None:
        self.pair = Pair(NATIVE, **(TIGHT | self.fixed | {"cache_groups": groups}))


LIVES = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestTwinMachine = TwinMachine.TestCase
TestTwinMachine.settings = LIVES
TestHybridTwinMachine = HybridTwinMachine.TestCase
TestHybridTwinMachine.settings = LIVES


def live(pair: Pair, seed: int, calls: int, options: dict[str, Any]) -> None:
    """Drive the pair of workers through a random history under load: mostly arrivals, and a few of
    every other action.
    """
    draw = random.Random(seed)
    block_size, longest = options["block_size"], options["max_model_tokens"]
    gap_ns = draw.choice([10**6, 10**7, 5 * 10**7])
    for request_id in range(calls):
        if draw.random() < 0.8:
            pair.run_until(pair.now_ns + draw.randrange(draw.choice([1, gap_ns, 4 * gap_ns])))
        else:
            pair.run_until(max(pair.now_ns, pair.native.next_ns()))
        kind = draw.random()
        if kind < 0.75:
            depth = draw.randrange(longest // block_size + 2)
            shared = draw.randrange(depth + 1)
            path = [draw.randrange(3)] * shared
            path += [draw.randrange(2) for _ in range(depth - shared)]
            prompt_tokens = depth * block_size + draw.randrange(block_size)
            output_tokens = draw.choice([draw.randrange(6), draw.randrange(1, 60)])
            priority = draw.randrange(-1, 3)
            chain = chain_of(path)
            legs = (draw.random() < 0.2, draw.random() < 0.2)
            pair.add(request_id, chain, prompt_tokens, output_tokens, priority, legs=legs)
            pair.end_read(draw.randrange(20), draw.random() < 0.8)
            pair.release(draw.randrange(20))
        elif kind < 0.85:
            pair.at("cancel", draw.randrange(max(0, request_id - 12), request_id + 1))
        elif kind < 0.92:
            pair.at("set_speed", draw.choice(SPEEDS))
        else:
            pair.at(draw.choice(CALLS))
    pair.at("snapshot")
    pair.at("host_blocks")
    pair.at("group_blocks")
    pair.drain()


def soak(seeds: range, calls: int, hybrid: bool = False) -> dict[str, int]:
    """Drive pairs through random histories; return the sums of what happened. `hybrid` adds windows
    and states.
    """
    seen: dict[str, int] = {}
    for seed in seeds:
        draw = random.Random(seed)
        varied = {name: draw.choice(values) for name, values in VARIATIONS.items()}
        options = TIGHT | (varied if seed % 2 else {})
        if hybrid:
            sizes = {"blocks": draw.choice([16, 20, 40, 200]), "block_size": 4, "host_blocks": 0}
            options |= sizes | {"cache_groups": draw.choice(GROUPS)}
        pair = Pair(NATIVE, **options)
        live(pair, seed, calls, options)
        for name, count in (pair.seen | pair.native.stats(pair.now_ns)._asdict()).items():
            seen[name] = seen.get(name, 0) + count
    return seen


def test_native_and_python_agree_over_rich_random_histories() -> None:
    """Native and plain worker agree over random histories, in which everything happens in which
    they could differ.
    """
    seen = soak(range(60), calls=100)
    for name in ("first", "finished", "stored", "removed", "cleared", "runs", "reads", "released"):
        assert seen[name] > 50, f"hardly any {name} in {seen}"
    for name in ("stored_host", "removed_host", "host_hit_tokens"):
        assert seen[name] > 50, f"hardly any {name} in {seen}"
    for name in ("evicted", "preemptions", "recomputed_tokens", "hit_tokens"):
        assert seen[name] > 50, f"hardly any {name} in {seen}"


def test_native_and_python_agree_with_windows_and_states() -> None:
    seen = soak(range(2000, 2080), calls=100, hybrid=True)
    for name in ("kept_first", "dropped_first", "kept_second", "dropped_second", "preemptions"):
        assert seen[name] > 50, f"hardly any {name} in {seen}"
    for name in ("evicted", "hit_tokens", "cleared", "runs", "reads", "released"):
        assert seen[name] > 50, f"hardly any {name} in {seen}"


@pytest.mark.full
@pytest.mark.parametrize("hybrid", [False, True])
def test_native_and_python_agree_over_long_random_histories(hybrid: bool) -> None:
    soak(range(1000, 1100), 3000, hybrid)


def test_native_and_python_agree_for_a_worker_of_real_size() -> None:
    """A worker of real size agrees with its Python version: full batches, chunked prompts of
    thousands of tokens, answers of hundreds, and so long runs.
    """
    options = TIGHT | {
        "blocks": 3000,
        "block_size": 512,
        "max_num_tokens": 8192,
        "max_batch_size": 64,
        "max_model_tokens": 131_072,
        "prefix_wait_tokens": 256,
        "max_queue": 4096,
        "ageing_s": 10.0,
    }
    pair = Pair(NATIVE, **options)
    draw = random.Random(5)
    for request_id in range(150):
        path = [draw.randrange(4)] * draw.randrange(1, 30)
        prompt_tokens = len(path) * 512 + draw.randrange(512)
        pair.at("add", request_id, chain_of(path), prompt_tokens, draw.randrange(1, 400), 0)
        pair.run_until(pair.now_ns + draw.randrange(60_000_000))
    pair.drain()
    assert pair.seen["finished"] == 150
    assert pair.seen["runs"] > pair.native.stats(pair.now_ns).steps / 2

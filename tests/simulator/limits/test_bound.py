"""Tests of the parts of the bounds on what any policy can reach, against slow and plain versions
that try everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations, permutations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.step_time import StepTime
from simulator.limits.bounds import (
    fcfs_completions,
    lower_bounds,
    most_hits,
    most_on_time,
    srpt_mean_flow,
)
from simulator.limits.hits import POOL_RULES, hits
from simulator.limits.work import (
    Machine,
    first_token_ns,
    further_tokens_ns,
    know,
    machine,
    reuse_ceiling_tokens,
    shares,
    step_s,
)
from simulator.replay.setup import Goodput, WorkerGroup
from simulator.traces.chain import Chainer
from simulator.traces.job import Job
from tests.effort import examples
from tests.oracles.virtual_worker import VirtualWorker

IDS = st.lists(st.integers(0, 5), min_size=0, max_size=3, unique=True)


def best_by_trying(
    requests: Sequence[Sequence[int]], reusable: Sequence[int], capacity: int
) -> int:
    """Return the most blocks that a cache could find, by trying every content that it could keep
    after each request.
    """
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for ids, usable in zip(requests, reusable, strict=True):
        after: dict[frozenset[int], int] = {}
        for content, found in best.items():
            total = found + sum(block in content for block in ids[:usable])
            offered = sorted(content | set(ids))
            size = min(capacity, len(offered))
            for kept in combinations(offered, size):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), total)
        best = after
    return max(best.values())


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(IDS, st.integers(0, 3)), max_size=9), st.integers(1, 4))
def test_most_hits_equals_an_exhaustive_search(
    history: list[tuple[list[int], int]], capacity: int
) -> None:
    requests, reusable = [ids for ids, _ in history], [usable for _, usable in history]
    assert most_hits(requests, reusable, capacity) == best_by_trying(requests, reusable, capacity)


PATHS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=30)


def prefix_ids(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the paths as lists of ids, each of which names a whole prefix."""
    names: dict[tuple[int, ...], int] = {}
    return [
        [names.setdefault(tuple(path[: n + 1]), len(names) + 1) for n in range(len(path))]
        for path in paths
    ]


@settings(max_examples=examples(60))
@given(PATHS, st.integers(1, 3), st.integers(1, 6))
def test_no_rule_has_more_hits_than_the_union_of_the_caches(
    paths: list[list[int]], workers: int, capacity: int
) -> None:
    requests = prefix_ids(paths)
    jobs = [Job(0, 10 * len(ids), 1, np.array(ids, dtype=np.uint64)) for ids in requests]
    tokens = sum(job.prompt_tokens for job in jobs)
    most = most_hits(requests, [len(ids) for ids in requests], workers * capacity)
    rows = hits(jobs, block_tokens=10, workers=workers, kv_tokens=10 * capacity, rules=POOL_RULES)
    assert all(row.hit_rate_tokens * tokens <= 10 * most + 1e-6 for row in rows)


def test_a_cache_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        most_hits([[1]], [1], 0)


# --- One machine --------------------------------------------------------------------------------

TASKS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=4)


def split(tasks: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    tasks = sorted(tasks, key=lambda task: task[0])
    return [float(release) for release, _ in tasks], [float(work) for _, work in tasks]


def best_flow(releases: list[float], works: list[float], now: int = 0) -> float:
    """Return the least sum of flow times over all ways to give each unit of time to a waiting
    request.
    """
    left = [n for n, work in enumerate(works) if work > 0]
    if not left:
        return 0.0
    ready = [n for n in left if releases[n] <= now]
    if not ready:
        return best_flow(releases, works, now + 1)
    results = []
    for n in ready:
        works[n] -= 1
        done = now + 1 - releases[n] if not works[n] else 0.0
        results.append(done + best_flow(releases, works, now + 1))
        works[n] += 1
    return min(results)


@settings(max_examples=examples(40), deadline=None)
@given(TASKS)
def test_shortest_remaining_work_first_has_the_least_mean_flow_time(
    tasks: list[tuple[int, int]],
) -> None:
    releases, works = split(tasks)
    assert srpt_mean_flow(releases, works) == pytest.approx(
        best_flow(releases, list(works)) / len(works)
    )


@settings(max_examples=examples(60))
@given(TASKS)
def test_first_come_first_served_has_the_least_maximum_flow_time(
    tasks: list[tuple[int, int]],
) -> None:
    releases, works = split(tasks)

    def longest(order: Sequence[int]) -> float:
        now, worst = 0.0, 0.0
        for n in order:
            now = max(now, releases[n]) + works[n]
            worst = max(worst, now - releases[n])
        return worst

    ends = fcfs_completions(releases, works)
    mine = max(end - release for end, release in zip(ends, releases, strict=True))
    assert mine == min(longest(order) for order in permutations(range(len(works))))


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=9), st.integers(1, 9))
def test_most_on_time_equals_an_exhaustive_search(tasks: list[tuple[int, int]], limit: int) -> None:
    releases, works = split(tasks)

    def all_on_time(chosen: tuple[int, ...]) -> bool:
        ends = fcfs_completions([releases[n] for n in chosen], [works[n] for n in chosen])
        return all(end <= releases[n] + limit for end, n in zip(ends, chosen, strict=True))

    numbers = range(len(works))
    choices = chain.from_iterable(combinations(numbers, size) for size in range(len(works) + 1))
    best = max(len(chosen) for chosen in choices if all_on_time(chosen))
    assert most_on_time(releases, works, limit) == best


def test_most_on_time_of_a_long_overload_takes_reasonable_time() -> None:
    count = 3000
    releases = [0.01 * n for n in range(count)]
    works = [0.02 + 0.01 * (n % 3) for n in range(count)]
    kept = most_on_time(releases, works, 5.0)
    # The short ones alone: a third of them, which is two thirds of the capacity; then the middle.
    assert 1200 < kept < 1500


# --- Steps --------------------------------------------------------------------------------------

CONSTANT = st.floats(0.0, 0.05)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    step_time = StepTime(
        linear_s=draw(st.floats(1e-6, 1e-3)),
        pair_s=draw(st.floats(0.0, 1e-6)),
        weights_s=draw(CONSTANT),
        context_s=draw(st.floats(0.0, 1e-5)),
        experts_s=draw(CONSTANT),
        expert_share=draw(st.floats(0.0, 1.0)),
        overhead_s=draw(st.floats(1e-4, 0.01)),
        seq_s=draw(st.floats(0.0, 1e-4)),
        softmax_p=draw(st.floats(0.25, 8.0)),
    )
    batch = draw(st.integers(1, 40))
    return Machine(
        count=draw(st.integers(1, 3)),
        step_time=step_time,
        speed=draw(st.sampled_from([0.5, 1.0, 3.0])),
        blocks=draw(st.integers(20, 60)),
        block_size=draw(st.sampled_from([4, 16])),
        max_num_tokens=max(batch, 16, draw(st.integers(1, 300))),
        max_batch_size=batch,
        sequence_tokens=10_000,
        prefix_wait_tokens=draw(st.sampled_from([0, 16])),
    )


@settings(max_examples=examples(200))
@given(machines(), st.data())
def test_the_parts_of_a_step_never_exceed_it(kind: Machine, data: st.DataObject) -> None:
    decodes = data.draw(st.integers(0, kind.max_batch_size))
    prefill = data.draw(st.integers(0, kind.max_num_tokens - decodes))
    assume(decodes + prefill)
    whole_s = step_s(kind.step_time, decodes + prefill, 0)
    for share in shares(kind):
        assert share.prefill_s >= 0.0
        parts_s = share.prefill_s * prefill + share.decode_s * decodes
        assert parts_s <= whole_s * (1 + 1e-9), share


@settings(max_examples=examples(60))
@given(machines(), st.integers(1, 150), st.integers(1, 30))
def test_a_single_request_takes_hardly_longer_than_its_lower_bound(
    kind: Machine, prompt_tokens: int, output_tokens: int
) -> None:
    capacity = kind.blocks * kind.block_size
    assume(prompt_tokens + output_tokens < capacity)
    step_time = kind.step_time
    worker = VirtualWorker(
        blocks=kind.blocks,
        block_size=kind.block_size,
        step_time=[getattr(step_time, name) for name in StepTime.__dataclass_fields__],
        max_num_tokens=kind.max_num_tokens,
        max_batch_size=kind.max_batch_size,
        speed=kind.speed,
    )
    worker.add(0, np.zeros(0, dtype=np.uint64), prompt_tokens, output_tokens, 0, 0)
    firsts, ends = [], []
    while (now_ns := worker.next_ns()) >= 0:
        first, _, finished, _ = worker.advance(now_ns)
        firsts += [now_ns] * len(first)
        ends += [now_ns] * len(finished)
    floor_ns = first_token_ns(kind, prompt_tokens, 0)
    further_ns = further_tokens_ns(kind, prompt_tokens, output_tokens)
    assert floor_ns <= firsts[0]
    assert further_ns <= ends[0] - firsts[0]
    if prompt_tokens <= kind.max_num_tokens:  # one step: nothing to divide
        assert firsts[0] - floor_ns <= 3
    if step_time.context_s * (prompt_tokens + output_tokens) < step_s(step_time, 1):
        assert ends[0] - firsts[0] - further_ns <= output_tokens + 3


# --- What is known ------------------------------------------------------------------------------


def make_job(ids: Sequence[int], prompt_tokens: int, answer: Sequence[int] = ()) -> Job:
    return Job(
        at_ns=0,
        prompt_tokens=prompt_tokens,
        output_tokens=10,
        ids=np.array(ids, dtype=np.uint64),
        answer_ids=np.array(answer, dtype=np.uint64),
    )


def test_shared_blocks_agree_with_a_count_by_hand() -> None:
    jobs = [
        make_job([1, 2, 3], 30, answer=[4]),
        make_job([1, 2, 3], 30),  # its last token is in block 3
        make_job([1, 2, 3, 4, 5], 55),  # block 4 is the answer of the first job
        make_job([9], 999),  # too long for any worker
    ]
    known = know(jobs, Chainer(10, 10).chain, 10, most_tokens=100)
    assert known.hopeless == 1
    assert known.matched_tokens == (0, 30, 40)
    assert known.shared_tokens == (0, 20, 40)
    # Blocks 1 and 2 are found at most twice, 3 and 4 by the last job only, 5 by none.
    assert reuse_ceiling_tokens(known) == 10 * (2 + 2 + 1 + 1)


def test_a_workload_that_no_worker_can_run_is_refused() -> None:
    kind = machine(WorkerGroup(2, "llama-3.1-8b-h100", max_model_tokens=20), 10)
    known = know([make_job([1, 2, 3], 30)], Chainer(10, 10).chain, 10, kind.sequence_tokens)
    with pytest.raises(ValueError, match="no request of the workload can run"):
        lower_bounds(known, [kind], 0, Goodput())

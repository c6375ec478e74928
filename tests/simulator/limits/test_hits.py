"""Tests of the hit rates of routing rules: computed by hand, by a slow and plain implementation,
and against published tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.limits.hits import POOL_RULES, RULES, HitRow, Holders, LruCache, hits
from simulator.traces.job import Job
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs
from tests.effort import examples

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"
SMALL = ("mooncake_conversation", "toolagent_surrogate")
CODING = "agentic_coding_merged"
M = 1_000_000


def make_job(ids: Sequence[int], prompt_tokens: int, at_s: float = 0.0) -> Job:
    return Job(
        at_ns=round(at_s * 1e9),
        prompt_tokens=prompt_tokens,
        output_tokens=1,
        ids=np.array(ids, dtype=np.uint64),
    )


def test_three_hit_rates_agree_with_a_computation_by_hand() -> None:
    jobs = [make_job([1, 2], 20), make_job([1, 2], 20), make_job([1, 3, 4], 25), make_job([], 5)]
    (row,) = hits(jobs, block_tokens=10, workers=1, kv_tokens=None, rules=["ideal"])
    assert row.hit_rate_tokens == pytest.approx(30 / 70)
    assert row.hit_rate_blocks == pytest.approx(3 / 7)
    assert row.hit_rate_requests == pytest.approx((1 + 0.4) / 4)
    assert (row.requests, row.workers, row.kv_tokens) == (4, 1, None)


def test_a_partial_last_block_saves_no_tokens() -> None:
    jobs = [make_job([1, 2], 15)] * 2
    (row,) = hits(jobs, block_tokens=10, workers=1, kv_tokens=None, rules=["ideal"])
    assert row.hit_rate_tokens == pytest.approx(10 / 30)
    assert row.hit_rate_blocks == pytest.approx(2 / 4)
    assert row.hit_rate_requests == pytest.approx(1 / 2)


def test_single_lru_has_one_workers_cache_and_pooled_lru_all_caches() -> None:
    jobs = [make_job([1], 10), make_job([2], 10), make_job([1], 10)]
    rows = hits(jobs, block_tokens=10, workers=2, kv_tokens=10, rules=["single_lru", "pooled_lru"])
    assert [(row.workers, row.kv_tokens) for row in rows] == [(1, 10), (1, 20)]
    assert [row.hit_rate_tokens for row in rows] == [0.0, pytest.approx(1 / 3)]


def test_the_bounded_rule_leaves_an_overloaded_worker() -> None:
    jobs = [make_job([1, 100 + n], 20) for n in range(6)]
    greedy, bounded = hits(
        jobs, block_tokens=10, workers=2, kv_tokens=None, rules=["greedy", "bounded"]
    )
    assert greedy.load_skew == pytest.approx(2.0)
    assert bounded.load_skew < 1.3
    assert bounded.hit_rate_tokens < greedy.hit_rate_tokens
    # Work older than a minute is forgotten, so no load keeps requests from the holder any more.
    apart = [make_job([1, 100 + n], 20, at_s=61.0 * n) for n in range(6)]
    (row,) = hits(apart, block_tokens=10, workers=2, kv_tokens=None, rules=["bounded"])
    assert row.load_skew == pytest.approx(2.0)


def test_no_requests_give_rows_of_zeros() -> None:
    rows = hits([], block_tokens=16, workers=2, kv_tokens=64)
    assert [row.rule for row in rows] == list(RULES)
    assert all(row.hit_rate_tokens == 0.0 and row.load_skew == 1.0 for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tokens": 0}, "block_tokens must be at least 1, got 0"),
        ({"workers": 0}, "workers must be 1 to 4096, got 0"),
        ({"kv_tokens": 15}, r"at least one block \(16 tokens\), got 15"),
        ({"rules": ["gredy"]}, "unknown rule 'gredy'; valid ones: single_lru, round_robin"),
    ],
)
def test_bad_values_are_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"block_tokens": 16, "workers": 2, "kv_tokens": 64}
    with pytest.raises(ValueError, match=message):
        hits([], **(good | change))  # type: ignore[arg-type]


CHAINS = st.lists(st.integers(0, 9), min_size=0, max_size=6, unique=True)


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 3), CHAINS), max_size=40),
    st.one_of(st.none(), st.integers(1, 8)),
)
def test_holders_agree_with_separate_lru_caches(
    history: list[tuple[int, list[int]]], capacity: int | None
) -> None:
    plain = [LruCache(capacity) for _ in range(4)]
    holders = Holders(4, capacity)
    for worker, ids in history:
        matches = [cache.match(ids) for cache in plain]
        longest = max(matches)
        bits = sum(1 << row for row, match in enumerate(matches) if match == longest)
        assert holders.longest(ids) == (longest, bits)
        assert [holders.match(row, ids) for row in range(4)] == matches
        plain[worker].insert(ids)
        holders.insert(worker, ids)


class ListCache:
    """An LRU cache as a list, most recent block first; it is slow and follows the definition."""

    def __init__(self, capacity: int | None) -> None:
        self.ids: list[int] = []
        self.capacity = capacity

    def insert(self, ids: Sequence[int]) -> None:
        for block in reversed(ids):
            self.ids = [block, *(other for other in self.ids if other != block)]
        self.ids = self.ids[: self.capacity]


@settings(max_examples=examples(100))
@given(st.lists(CHAINS, max_size=30), st.one_of(st.none(), st.integers(1, 8)))
def test_an_lru_cache_agrees_with_a_plain_list(
    chains: list[list[int]], capacity: int | None
) -> None:
    cache, plain = LruCache(capacity), ListCache(capacity)
    for ids in chains:
        expected = next((n for n, block in enumerate(ids) if block not in plain.ids), len(ids))
        assert cache.match(ids) == expected
        before = set(plain.ids)
        added, evicted = cache.insert(ids)
        plain.insert(ids)
        assert len(cache) == len(plain.ids)
        assert (before | set(added)) - set(evicted) == set(plain.ids)


def printed(value: float, digits: int) -> Decimal:
    """Return `value` rounded as the authors of the published tables did: first to one digit more,
    halves up both times.
    """
    once = Decimal(value).quantize(Decimal(1).scaleb(-digits - 1), ROUND_HALF_UP)
    return once.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


def trace_jobs(name: str) -> list[Job]:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the checkout")
    return list(open_jobs(WorkloadSpec(str(path))).jobs)


IDEAL = {
    "mooncake_conversation": ("0.3664", "0.3734", "0.409"),
    "toolagent_surrogate": ("0.5574", "0.5745", "0.692"),
    CODING: ("0.9528", "0.9505", "0.942"),
}
CAPACITIES = (M // 10, 3 * M // 10, M, 3 * M, 10 * M, 30 * M, 100 * M)
SINGLE = {
    "mooncake_conversation": "0.043 0.043 0.054 0.139 0.291 0.366 0.373",
    "toolagent_surrogate": "0.327 0.356 0.365 0.422 0.523 0.570 0.575",
    CODING: "0.005 0.011 0.026 0.073 0.658 0.947 0.951",
}
# Per (workers, kv_tokens of each): rates of POOL_RULES in order; behind a slash the skew where it
# is above 1.15.
POOL: dict[str, dict[tuple[int, int | None], str]] = {
    "mooncake_conversation": {
        (8, M): "0.081 0.077 0.054/8.0 0.265 0.054/8.0 0.258",
        (8, 3 * M): "0.116 0.110 0.139/8.0 0.360 0.139/8.0 0.346",
        (8, None): "0.139 0.135 0.373/8.0 0.373 0.373/8.0 0.358",
        (16, 3 * M): "0.096 0.090 0.139/16 0.370/1.2 0.139/16 0.330",
    },
    "toolagent_surrogate": {
        (8, M): "0.379 0.377 0.366/7.7 0.508/1.3 0.366/7.7 0.499",
        (8, 3 * M): "0.401 0.398 0.428/7.7 0.566/1.2 0.428/7.7 0.557",
        (16, 3 * M): "0.386 0.386/1.2 0.428/15 0.572/1.5 0.428/15 0.549",
    },
    CODING: {
        (8, M): "0.079 0.076 0.430/2.8 0.445/2.8 0.486 0.469",
        (8, 3 * M): "0.244 0.238 0.838/4.7 0.864/4.4 0.908/2.3 0.821",
        (8, None): "0.723 0.722 0.951/2.0 0.951/2.1 0.951/1.5 0.873",
    },
}


def check_row(row: HitRow, cell: str) -> None:
    rate, _, skew = cell.partition("/")
    assert str(printed(row.hit_rate_tokens, 3)) == rate, row
    if skew:
        assert str(printed(row.load_skew, len(skew.partition(".")[2]))) == skew, row
    else:
        assert row.load_skew <= 1.15, row


def check_tables(name: str, every: int = 1) -> None:
    """Assert that hit rates equal the trace's three published tables to the printed digit; `every`
    n checks only every n-th cell.
    """
    jobs = trace_jobs(name)
    (ideal,) = hits(jobs, block_tokens=512, workers=1, kv_tokens=None, rules=["ideal"])
    rates = (ideal.hit_rate_blocks, ideal.hit_rate_tokens, ideal.hit_rate_requests)
    assert [str(printed(x, n)) for x, n in zip(rates, (4, 4, 3), strict=True)] == list(IDEAL[name])
    singles = zip(CAPACITIES, SINGLE[name].split(), strict=True)
    for kv_tokens, cell in list(singles)[::every]:
        rows = hits(jobs, block_tokens=512, workers=1, kv_tokens=kv_tokens, rules=["single_lru"])
        check_row(rows[0], cell)
    for (workers, kv_limit), cells in list(POOL[name].items())[::every]:
        rows = hits(jobs, block_tokens=512, workers=workers, kv_tokens=kv_limit, rules=POOL_RULES)
        for row, cell in zip(rows, cells.split(), strict=True):
            check_row(row, cell)


@pytest.mark.parametrize("name", SMALL)
def test_a_third_of_the_published_cells_is_reproduced(name: str) -> None:
    """A third of the published cells, with small and large caches, are met to the printed digit."""
    check_tables(name, every=3)


@pytest.mark.full
@pytest.mark.parametrize("name", [*SMALL, CODING])
def test_the_published_tables_are_reproduced(name: str) -> None:
    check_tables(name)

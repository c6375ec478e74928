"""Tests of the figures of a replay, against figures computed by hand, and of its hash."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.replay.result import NEVER, Verdict
from simulator.replay.setup import Goodput
from simulator.report.row import NO_SPREAD, PERCENTS, ReplayRow, quantile, spread, summarize
from tests.effort import examples
from tests.simulator.replayed import MS, S, busy_result, rejected, result, setup, table, totals

NAMES = (
    *("policy", "params", "seed", "requests", "completed", "rejected", "failed", "input_tokens"),
    *("output_tokens", "hit_rate_tokens", "hit_rate_blocks", "hit_rate_mean", "ttft_ms"),
    *("tpot_ms", "e2e_ms", "output_tokens_per_s", "goodput", "load_skew_requests"),
    *("load_skew_busy", "busy_share", "evicted_blocks", "recomputed_tokens", "retries", "holds"),
    *("rejections", "trace_errors", "simulated_s", "wall_s", "requests_per_wall_s"),
    "report_hash",
)


def three_and_a_loss() -> list[dict[str, Any]]:
    """Return four requests: two answered (one with a single token), one rejected, one failed."""
    return [
        {"first": 100.0, "finish": 500.0, "output": 5, "prompt": 160, "hit": 80},
        {"first": 200.0, "finish": 200.0, "output": 1, "prompt": 40, "hit": 32, "expected": 0},
        {"arrival": 7.0, "prompt": 1000, **rejected()},
        {"first": 900.0, "finish": None, "output": 3, "hit": 0, "verdict": Verdict.FAILED},
    ]


def test_the_fields_of_a_row_keep_their_order() -> None:
    assert tuple(ReplayRow.__struct_fields__[: len(NAMES)]) == NAMES


def test_the_figures_of_a_row_agree_with_a_computation_by_hand() -> None:
    row = summarize(
        result(
            three_and_a_loss(),
            workers=(
                totals("w0", requests=3, busy_ns=6 * S, evicted_blocks=4, preemptions=1),
                totals("w1", requests=1, busy_ns=2 * S, evicted_blocks=3, recomputed_tokens=9),
            ),
            rejections={"queue_full": 1, "no_worker": 2},
            retries=3,
            holds=2,
            trace_errors=1,
        )
    )
    assert (row.requests, row.completed, row.rejected, row.failed) == (4, 2, 1, 1)
    assert (row.input_tokens, row.output_tokens) == (160 + 40 + 1000 + 160, 6)
    assert row.hit_rate_tokens == round((80 + 32 + 0) / (160 + 40 + 160), 5)
    assert row.hit_rate_blocks == round((5 + 2 + 0) / (10 + 2 + 10), 5)
    assert row.hit_rate_mean == round((0.5 + 0.8 + 0.0) / 3, 5)
    assert row.hit_error_tokens == round((0 + 32 + 80) / 3, 3)
    assert (row.ttft_ms.mean, row.ttft_ms.p50, row.ttft_ms.p90) == (150.0, 150.0, 190.0)
    assert (row.ttft_ms.p95, row.ttft_ms.p99, row.ttft_ms.max) == (195.0, 199.0, 200.0)
    assert row.tpot_ms.mean == row.tpot_ms.max == 100.0
    assert (row.e2e_ms.mean, row.e2e_ms.max) == (350.0, 500.0)
    assert row.output_tokens_per_s == 0.6
    # Both answers are within 200 and 100 ms; two of four requests got none.
    assert (row.goodput.ttft_ms, row.goodput.tpot_ms, row.goodput.share) == (200.0, 100.0, 0.5)
    assert (row.load_skew_requests, row.load_skew_busy) == (1.5, 1.5)
    assert (row.busy_share, row.requests_per_worker) == ((0.6, 0.2), (3, 1))
    assert (row.evicted_blocks, row.recomputed_tokens, row.preemptions) == (7, 9, 1)
    assert (row.retries, row.holds, row.trace_errors) == (3, 2, 1)
    assert list(row.rejections.items()) == [("no_worker", 2), ("queue_full", 1)]
    assert (row.simulated_s, row.wall_s, row.requests_per_wall_s) == (10.0, 0.5, 8.0)


@pytest.mark.parametrize(
    ("limits", "share"),
    [((99.9, 100.0), 0.0), ((100.0, 100.0), 0.25), ((200.0, 99.9), 0.25), ((1e9, 1e9), 0.5)],
)
def test_a_value_on_the_goodput_limit_is_good(limits: tuple[float, float], share: float) -> None:
    limited = msgspec.structs.replace(setup(), goodput=Goodput(*limits))
    row = summarize(result(three_and_a_loss(), setup=limited))
    assert row.goodput.share == share


def test_figures_without_measurements_are_null() -> None:
    row = summarize(result([rejected()], workers=(totals(),), simulated_ns=0, wall_s=0.0))
    assert row.ttft_ms == row.tpot_ms == row.e2e_ms == NO_SPREAD
    nulls = (row.hit_rate_tokens, row.hit_rate_blocks, row.hit_rate_mean, row.hit_error_tokens)
    assert nulls == (None,) * 4
    assert row.output_tokens_per_s is row.requests_per_wall_s is None
    assert row.load_skew_requests is row.load_skew_busy is None
    assert (row.goodput.share, row.busy_share) == (0.0, (0.0,))
    assert summarize(result([])).goodput.share is None


def test_the_hits_of_a_rejected_request_do_not_count() -> None:
    row = summarize(result([{"hit": 80}, {**rejected(), "hit": 0}, {**rejected(), "hit": 160}]))
    assert row.hit_rate_tokens == 0.5
    # A request that its worker never admitted does not count as one without hits.
    lost = {"first": None, "finish": None, "hit": NEVER, "verdict": Verdict.FAILED}
    assert summarize(result([{"hit": 80}, lost])).hit_rate_tokens == 0.5


def test_the_hash_covers_only_simulated_figures() -> None:
    first = summarize(busy_result())
    assert len(first.report_hash) == 16
    assert int(first.report_hash, 16) >= 0
    assert summarize(busy_result()) == first
    slower = summarize(replace(busy_result(), wall_s=77.0))
    assert slower.report_hash == first.report_hash
    assert slower.requests_per_wall_s != first.requests_per_wall_s


def test_the_hash_does_not_depend_on_integer_types() -> None:
    given_result = busy_result()
    wider = replace(
        given_result.table,
        worker=given_result.table.worker.astype(np.int64),
        verdict=given_result.table.verdict.astype(">i4"),
    )
    assert summarize(replace(given_result, table=wider)) == summarize(given_result)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "kv_load"},
        {"params": {"load_factor": 2.0}},
        {"holds": 1},
        {"rejections": {"queue_full": 2}},
        {"simulated_ns": 39 * S},
        {"setup": setup(seed=1, workers=8)},
    ],
)
def test_every_figure_changes_the_hash(change: dict[str, Any]) -> None:
    assert (
        summarize(replace(busy_result(), **change)).report_hash
        != summarize(busy_result()).report_hash
    )


@pytest.mark.parametrize("column", ["arrival_ns", "worker", "attempts", "dispatched_ns"])
def test_one_integer_of_the_table_changes_the_hash(column: str) -> None:
    before = busy_result()
    changed = getattr(before.table, column).copy()
    changed[17] += 1
    after = replace(before, table=replace(before.table, **{column: changed}))
    assert summarize(after).report_hash != summarize(before).report_hash


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=60), st.integers(0, 100))
@settings(max_examples=examples(200))
def test_quantiles_agree_with_exact_fractions(values: list[int], percent: int) -> None:
    ordered = sorted(values)
    place = Fraction(percent * (len(values) - 1), 100)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    exact = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    assert Fraction(*quantile(np.array(ordered, dtype=np.int64), percent)) == exact
    assert float(exact) == pytest.approx(np.percentile(values, percent), rel=1e-9)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60))
@settings(max_examples=examples(200))
def test_a_spread_rounds_once_and_does_not_depend_on_order(values: list[int]) -> None:
    told = spread(np.array(values, dtype=np.int64))
    assert told == spread(np.array(values[::-1], dtype=np.int64))
    assert told.mean == round(float(Fraction(sum(values), len(values) * MS)), 3)
    assert told.max == round(max(values) / MS, 3)
    quantiles = [getattr(told, f"p{percent}") for percent in PERCENTS]
    assert quantiles == sorted(quantiles)
    assert quantiles[-1] <= told.max


def test_the_test_tables_have_the_given_values() -> None:
    made = table([{"arrival": 2.0, "first": 1.5, "finish": None}, rejected()])
    assert made.first_token_ns.tolist() == [3_500_000, NEVER]
    assert made.finish_ns.tolist() == [NEVER, NEVER]
    assert made.dispatched_ns.tolist() == [2_000_000, NEVER]

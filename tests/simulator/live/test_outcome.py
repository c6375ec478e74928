"""Tests of the arithmetic of result rows, and of the claims that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from simulator.live.demo import claims
from simulator.live.outcome import LiveVerdict, TimeSpread, as_report, hot_share, spread, summarize
from tests.simulator.made_up import WORKERS, counters, demo_runs, outcome, run


def test_spread_interpolates_and_is_empty_without_values() -> None:
    assert spread([]) == TimeSpread(None, None, None, None)
    assert spread([5.0]) == TimeSpread(5.0, 5.0, 5.0, 5.0)
    assert spread([float(v) for v in range(101)]) == TimeSpread(50.0, 50.0, 90.0, 99.0)


def test_a_row_sums_up_its_outcomes() -> None:
    outcomes = [
        outcome(0, worker="a", ttft_ms=100.0, e2e_ms=1000.0, scheduled_s=0.0, sent_s=0.002),
        outcome(1, worker="a", ttft_ms=300.0, e2e_ms=3000.0, scheduled_s=1.0, sent_s=1.0),
        outcome(2, worker="b", verdict=LiveVerdict.REJECTED, status=503, ttft_ms=None, e2e_ms=5.0),
        outcome(3, worker=None, verdict=LiveVerdict.FAILED, status=0, ttft_ms=None, e2e_ms=5.0),
    ]
    before = [counters(query_tokens=100, hit_tokens=100, steps=10, overrun_steps=10, busy_s=1)] * 3
    after = [
        counters(query_tokens=300, hit_tokens=250, steps=60, overrun_steps=11, busy_s=3),
        counters(query_tokens=200, hit_tokens=100, steps=60, overrun_steps=10, busy_s=1),
        before[0],
    ]
    row = summarize("p", "w", outcomes, ["a", "b", "c"], before, after, speed=2.0)
    assert (row.requests, row.completed, row.rejected, row.failed) == (4, 2, 1, 1)
    assert row.requests_per_worker == (2, 1, 0)
    assert row.workers == ("a", "b", "c")
    assert row.load_skew == 2.0
    # Wall times become model times at the workers' speed.
    assert row.ttft_ms.mean == 400.0
    assert row.e2e_ms.mean == 4000.0
    assert row.duration_s == 8.0
    assert row.output_tokens_per_s == 48 / 8
    assert row.hit_rate_tokens == 0.5
    assert row.overrun_steps_share == 0.01
    assert row.busy_share_per_worker == (0.5, 0.0, 0.0)
    assert row.generator_late_ms.mean == pytest.approx(1.0)


def test_good_answers_keep_both_limits_and_first_turns_are_separate() -> None:
    outcomes = [
        outcome(0, turn=0, ttft_ms=1000.0, itl_ms=25.0),  # in model time: on both limits
        outcome(1, turn=1, ttft_ms=1001.0, itl_ms=1.0),
        outcome(2, turn=2, ttft_ms=400.0, itl_ms=25.1),
        outcome(3, turn=0, ttft_ms=500.0, itl_ms=None),  # one token has no gap
        outcome(4, turn=3, ttft_ms=1.0, itl_ms=1.0, verdict=LiveVerdict.FAILED),
    ]
    row = summarize("p", "w", outcomes, speed=2.0)
    assert row.good_share == 2 / 5
    assert row.new_ttft_ms.mean == 1500.0
    assert row.continuation_ttft_ms.mean == 1401.0
    open_loop = summarize("p", "w", [outcome(0)])
    assert open_loop.new_ttft_ms == open_loop.continuation_ttft_ms == spread([])


def test_figures_without_measurements_are_null_not_zero() -> None:
    row = summarize("p", "w", [])
    assert row.requests == 0
    assert row.ttft_ms.mean is None
    assert row.hit_rate_tokens is None
    assert row.overrun_steps_share is None
    assert row.load_skew is None


def test_the_json_report_has_its_keys() -> None:
    report = json.loads(as_report([demo_runs()[0].row], machine="m"))
    assert report["machine"] == "m"
    row = report["results"][0]
    assert {
        "policy", "workload", "requests", "completed", "rejected", "requests_per_worker", "ttft_ms",
        "e2e_ms", "output_tokens_per_s", "hit_rate_tokens", "overrun_steps_share",
    } <= set(row)  # fmt: skip
    assert set(row["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
    assert len(row["requests_per_worker"]) == 8


def test_claims_hold_for_runs_that_support_them() -> None:
    rows = [run.row for run in demo_runs()]
    found = claims(rows)
    assert len(found) == 8
    assert all(claim.holds for claim in found), found
    assert hot_share(rows[1]) == 1.0


def test_claims_fail_for_runs_that_do_not_support_them() -> None:
    even = [run(policy).row for policy in ("round_robin", "kv_prefix", "hybrid")]
    assert [claim.holds for claim in claims(even)] == [False, False, True, True]
    same = [run(policy, "conversation").row for policy in ("round_robin", "hybrid")]
    assert [claim.holds for claim in claims(same)] == [False, True]
    agents = [run(policy, "agents", turns=8).row for policy in ("hybrid", "warmset")]
    assert [claim.holds for claim in claims(agents)] == [False, True]
    assert len(claims(agents[:1])) == 1  # without warmset nothing is claimed of it
    lost = msgspec.structs.replace(even[0], failed=1)
    assert [claim.holds for claim in claims([lost])] == [False]
    assert claims([]) == []


def test_the_cost_of_waiting_is_the_figure_that_grew_most() -> None:
    """The price of waiting is the figure that grew most, because the mean of first turns may stay
    while the longest waits grow.
    """
    full, kept = (run(policy, "agents", turns=8).row for policy in ("hybrid", "warmset"))
    full = msgspec.structs.replace(
        full,
        ttft_ms=TimeSpread(4567, 4772, 7799, 11945),
        new_ttft_ms=TimeSpread(4629, 4745, 6980, 9302),
    )
    kept = msgspec.structs.replace(
        kept,
        ttft_ms=TimeSpread(1054, 184, 2080, 17518),
        new_ttft_ms=TimeSpread(4616, 1572, 11222, 36983),
    )
    text = claims([full, kept])[0].text
    assert text.endswith(
        "Its price: TTFT p99 is 17.52 s against 11.95 s, of first turns 36.98 s against 9.30 s."
    )
    at_p90 = msgspec.structs.replace(kept, ttft_ms=TimeSpread(1054, 184, 9000, 11945))
    text = claims([full, at_p90])[0].text
    assert "Its price: TTFT p90 is 9.00 s against 7.80 s, of first turns" in text
    free = msgspec.structs.replace(kept, ttft_ms=TimeSpread(1054, 184, 2080, 11945))
    assert "It has no price here" in claims([full, free])[0].text


def test_lateness_is_never_negative() -> None:
    early = replace(outcome(0), scheduled_s=1.0, sent_s=0.9)
    assert early.late_ms == 0.0
    assert WORKERS[0] == early.worker

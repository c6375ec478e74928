"""Tests of the comparison of a replay with a live run: figures, placements, and the text on
differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from simulator.calibrate.validate import (
    MEAN_TTFT,
    Metric,
    Placements,
    Unit,
    Validation,
    compared,
    explained,
    matched,
    metric,
    placements,
    same_ranking,
    summary,
    validation_table,
)
from simulator.live.outcome import LiveVerdict, Outcome, summarize
from simulator.live.scrape import pool_samples
from simulator.live.stack import RunResult
from tests.effort import examples
from tests.simulator.made_up import WORKERS, counters, outcome
from tests.simulator.replayed import S, rejected, result, table, totals

SAME = Placements(100, 1.0, 1.0, 0.0, 0.0, 5_000, 5_000, 0, 0, 2.5)


@pytest.mark.parametrize(
    ("live", "simulated", "unit", "difference"),
    [
        (0.40, 0.425, "points", 2.5),
        (200.0, 190.0, "%", -5.0),
        (7.0, 9.0, "", 2.0),
        (0.0, 9.0, "%", None),
        (None, 9.0, "%", None),
        (0.5, None, "points", None),
    ],
)
def test_a_metrics_difference_is_relative_or_absolute_by_its_unit(
    live: float | None, simulated: float | None, unit: Unit, difference: float | None
) -> None:
    assert metric("m", live, simulated, unit).difference == difference


def test_a_value_on_the_limit_passes_and_a_missing_one_does_not() -> None:
    assert metric("m", 100.0, 115.0, "%", 15.0).passed
    assert metric("m", 100.0, 85.0, "%", 15.0).passed
    assert not metric("m", 100.0, 115.1, "%", 15.0).passed
    assert not metric("m", None, 100.0, "%", 15.0).passed
    assert metric("m", None, 100.0, "%").passed


def placed(serial: int, worker: int, cached: int, **fields: Any) -> Outcome:
    return outcome(serial, worker=WORKERS[worker], cached_tokens=cached, **fields)


def test_placements_agree_with_a_computation_by_hand() -> None:
    """Placements are compared as computed by hand; worker 0 of the replay is worker 1 of the live
    run, and the reverse.
    """
    live = [
        placed(0, 1, 80, ttft_ms=103.0),  # alike
        placed(1, 0, 0, ttft_ms=100.5),  # alike
        placed(2, 0, 0),  # same worker, but no hit there
        placed(3, 1, 96),  # placed at a worker that held less
        placed(4, 0, 80, verdict=LiveVerdict.FAILED),
        placed(5, 1, 80),  # turned away in the replay
        placed(6, 1, 80, ttft_ms=101.0),  # alike
    ]
    rows = [
        {"worker": 0, "hit": 80},
        {"worker": 1, "hit": 0},
        {"worker": 1, "hit": 48},
        {"worker": 1, "hit": 16},
        {"worker": 1},
        rejected(),
        {"worker": 0, "hit": 80},
    ]
    found = placements(live, table(rows), WORKERS[:2])
    assert found == Placements(
        requests=5,
        same_worker=0.8,
        same_hit=0.6,
        other_worker_other_hit=0.2,
        same_worker_other_hit=0.2,
        live_hit_tokens=80 + 0 + 0 + 96 + 80,
        simulated_hit_tokens=80 + 0 + 48 + 16 + 80,
        moved_hit_tokens=16 - 96,
        kept_hit_tokens=48,
        transport_ms=1.0,  # of 3, 0.5 and 1 ms
    )


def test_runs_without_a_common_request_are_reported() -> None:
    found = placements([placed(0, 0, 0)], table([rejected()]), WORKERS[:2])
    assert (found.requests, found.same_worker, found.transport_ms) == (0, 0.0, None)
    assert explained(Validation("p", (), found)) == ["no request was completed in both worlds"]


@given(st.permutations(range(5)), st.lists(st.integers(0, 4), min_size=5, max_size=60))
@settings(max_examples=examples(100))
def test_renamed_workers_are_matched(names: Sequence[int], where: list[int]) -> None:
    live = np.array(where, dtype=np.int64)
    simulated = np.array([names[worker] for worker in where], dtype=np.int64)
    assert np.array_equal(matched(simulated, live, 5), live)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
@settings(max_examples=examples(100))
def test_no_other_matching_of_workers_agrees_more(pairs: list[tuple[int, int]]) -> None:
    simulated, live = (np.array([p[k] for p in pairs], dtype=np.int64) for k in (0, 1))
    agreed = int(np.count_nonzero(matched(simulated, live, 4) == live))
    swapped = np.array([1, 0, 3, 2])
    for names in (np.arange(4), np.arange(4)[::-1], swapped):
        assert int(np.count_nonzero(names[simulated] == live)) <= agreed


def live_run(outcomes: Sequence[Outcome], hit_rate: float) -> RunResult:
    before = [counters() for _ in WORKERS[:2]]
    after = [counters(query_tokens=1000, hit_tokens=1000 * hit_rate, steps=10) for _ in WORKERS[:2]]
    row = summarize("hybrid", "w", outcomes, WORKERS[:2], before, after)
    return RunResult(row, tuple(outcomes), pool_samples([], 1.0), WORKERS[:2], ())


def test_a_validation_has_the_live_and_the_simulated_figures() -> None:
    outcomes = [placed(n, n % 2, 80, ttft_ms=110.0, prompt_tokens=160) for n in range(4)]
    simulated = result(
        [{"worker": 1 - n % 2, "first": 100.0} for n in range(4)],
        workers=(totals("w0", requests=2), totals("w1", requests=2)),
        simulated_ns=S,
    )
    found = compared("hybrid", live_run(outcomes, 0.5), simulated)
    named = {one.name: one for one in found.metrics}
    assert (named["completed"].live, named["completed"].simulated) == (4, 4)
    assert named["hit rate"].difference == 0.0
    assert named[MEAN_TTFT].difference == pytest.approx(-9.09)
    assert named["output tokens/s"].simulated == 20.0
    assert named["requests, max / mean"].difference == 0.0
    assert found.placements.same_worker == found.placements.same_hit == 1.0
    assert found.placements.transport_ms == 10.0
    assert found.passed
    assert (found.overrun_steps_share, found.late_p99_ms) == (0.0, 0.0)
    assert not compared("hybrid", live_run(outcomes, 0.53), simulated).passed
    late = [placed(n, n % 2, 80, ttft_ms=120.0) for n in range(4)]
    assert not compared("hybrid", live_run(late, 0.5), simulated).passed


def of_ttft(policy: str, live: float | None, simulated: float | None) -> Validation:
    return Validation(policy, (metric(MEAN_TTFT, live, simulated, "%", 15.0),), SAME)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((100.0, 105.0), (200.0, 190.0), True),
        ((100.0, 105.0), (200.0, 90.0), False),
        ((100.0, 100.9), (101.0, 100.0), True),  # level in both worlds
        ((100.0, 120.0), (101.0, 100.0), True),  # level in the live run: no contradiction
        ((None, None), (100.0, 100.0), True),
        ((None, 90.0), (100.0, 100.0), False),  # a missing answer is not good
        ((None, None), (None, None), True),
    ],
)
def test_the_ranking_differs_when_two_policies_change_places(
    one: tuple[float | None, float | None], other: tuple[float | None, float | None], same: bool
) -> None:
    found = [of_ttft("a", *one), of_ttft("b", *other)]
    assert same_ranking(found) is same
    assert same_ranking(found[::-1]) is same
    assert same_ranking(found[:1])
    assert ("the same" if same else "ANOTHER") in summary(found)


def test_policies_beyond_a_limit_are_named() -> None:
    far, near = of_ttft("far", 100.0, 140.0), of_ttft("near", 100.0, 101.0)
    assert summary([near]).endswith("all within their limits")
    assert summary([far, near]).endswith("beyond a limit: far")
    console = Console(file=StringIO(), record=True, width=100)
    console.print(validation_table(far), validation_table(near))
    text = console.export_text()
    assert "beyond" in text
    assert "ok" in text
    assert "+40.0 %" in text
    assert "±15 %" in text


def test_a_figure_without_a_limit_is_shown_and_not_judged() -> None:
    given_metrics = (Metric("rejected", 0, 12_345, 12_345, "", None), metric("x", None, None, "%"))
    found = Validation("p", given_metrics, SAME)
    console = Console(file=StringIO(), record=True, width=100)
    console.print(validation_table(found))
    text = console.export_text()
    assert "12,345" in text
    assert "ok" not in text
    assert "beyond" not in text
    assert found.passed


@pytest.mark.parametrize(
    ("overruns", "late_ms", "told"),
    [(0.031, 2.0, "3.1% of steps ended late"), (None, 70.0, "up to 70 ms late"), (0.002, 9.0, "")],
)
def test_a_machine_that_did_not_keep_up_is_reported(
    overruns: float | None, late_ms: float, told: str
) -> None:
    lines = explained(Validation("p", (), SAME, overruns, late_ms))
    assert any("did not keep up" in line for line in lines) is bool(told)
    assert told in lines[-1]


def test_every_difference_has_a_sentence() -> None:
    by = Placements(1_000, 0.7, 0.6, 0.3, 0.1, 9_000, 9_500, -200, 700, -1.25)
    told = explained(Validation("p", (), by))
    assert (
        told[0] == "1,000 requests completed in both: 70% on the same worker, 60% with the same hit"
    )
    assert "30% of requests were placed elsewhere (-200 tokens" in told[1]
    assert "10% found another cache on the same worker (+700 tokens" in told[1]
    assert "1.2 ms earlier" in told[2]
    same = explained(Validation("p", (), SAME))
    assert same[1] == "every hit is the same in both worlds"
    assert "2.5 ms later" in same[2]
    unknown = msgspec.structs.replace(SAME, transport_ms=None)
    assert len(explained(Validation("p", (), unknown))) == 2

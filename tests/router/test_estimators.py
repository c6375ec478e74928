"""What is learned of speeds and arrivals, and what cannot mislead it for long."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import FirstToken, Progress
from router.core.columns import WorkerColumns
from router.core.ledger import Charge
from router.estimators.arrivals import ArrivalEstimator
from router.estimators.speed import SpeedEstimator
from tests.router.core_world import World
from tests.router.property_support import patient


def speeds(rate: float = 15_000.0, step_s: float = 0.015) -> tuple[WorkerColumns, SpeedEstimator]:
    columns = WorkerColumns(1)
    columns.prefill_tokens_per_s[0], columns.step_s[0] = rate, step_s
    return columns, SpeedEstimator(columns)


def charge(uncached: int = 4000, alone: bool = True, dispatched_s: float = 0.0) -> Charge:
    tokens = (uncached, uncached, float(uncached), float(uncached))
    return Charge(1, 0, 0, *tokens, dispatched_s, alone)


@pytest.mark.parametrize(
    ("true_rate", "true_step_s"),
    [(300.0, 0.2), (15_000.0, 0.015), (15_000.0, 0.2), (1_500_000.0, 0.00015)],
)
def test_speeds_are_learned_whatever_they_are(true_rate: float, true_step_s: float) -> None:
    """From 50 times slower to 100 times faster than the first guess."""
    columns, speed = speeds()
    for _ in range(200):
        speed.first_token(charge(), 4000 / true_rate + columns.step_s[0] / 2)
        speed.token_gap(0, true_step_s)
    assert columns.prefill_tokens_per_s[0] == pytest.approx(true_rate, rel=0.05)
    assert columns.step_s[0] == pytest.approx(true_step_s, rel=0.05)


def test_a_worker_a_hundred_times_faster_is_learned_from_prefills_alone() -> None:
    """Its whole prefill is shorter than the half step that is believed to come before it."""
    columns, speed = speeds()
    for _ in range(200):
        speed.first_token(charge(), 4000 / 1_500_000.0)
    assert columns.prefill_tokens_per_s[0] > 1_000_000.0


@patient
@given(outliers=st.lists(st.floats(1e-9, 1e9), max_size=3))
def test_a_few_outliers_move_an_estimate_by_half_at_most_and_are_forgotten(outliers) -> None:
    columns, speed = speeds()
    for gap_s in outliers:
        speed.token_gap(0, gap_s)
        speed.first_token(charge(), gap_s)
    assert 0.5 < columns.step_s[0] / 0.015 < 2.0
    assert 0.5 < columns.prefill_tokens_per_s[0] / 15_000.0 < 2.0
    for _ in range(100):
        speed.token_gap(0, 0.015)
    assert columns.step_s[0] == pytest.approx(0.015, rel=0.01)


@pytest.mark.parametrize("sample_s", [1e-300, 1e300])
def test_no_run_of_absurd_samples_leads_out_of_range(sample_s: float) -> None:
    columns, speed = speeds()
    for _ in range(10_000):
        speed.token_gap(0, sample_s)
        speed.first_token(charge(), sample_s)
    assert 1e-6 <= columns.step_s[0] <= 10.0
    assert 1.0 <= columns.prefill_tokens_per_s[0] <= 1e9


@pytest.mark.parametrize(
    "told", [charge(alone=False), charge(uncached=255), charge(dispatched_s=99.0)]
)
def test_what_says_nothing_of_speed_is_not_learned_from(told: Charge) -> None:
    """Behind others, too short, or answered before it was sent (a clock that went back)."""
    columns, speed = speeds()
    speed.first_token(told, 10.0)
    assert columns.prefill_tokens_per_s[0] == 15_000.0


def test_first_tokens_and_progress_out_of_turn_change_nothing() -> None:
    world = World(workers=1)
    core = world.core
    core.on_first_token(FirstToken(0.0, 99))
    core.on_progress(Progress(0.0, 99, 5))
    arrival = world.arrival([1, 2])
    core.on_arrival(arrival)
    core.on_progress(Progress(0.1, arrival.request_id, 5))  # before its first token
    assert core.columns.context_tokens[0] == 0
    core.on_first_token(FirstToken(0.2, arrival.request_id))
    core.on_first_token(FirstToken(0.3, arrival.request_id))
    core.on_progress(Progress(0.2, arrival.request_id, 3))  # in the same moment: no gap
    core.on_progress(Progress(0.2, arrival.request_id, 2))  # fewer than before
    assert core.columns.context_tokens[0] == 8 + 3
    assert math.isfinite(core.columns.step_s[0])


@patient
@given(gaps=st.lists(st.floats(0.001, 1.0), min_size=200, max_size=200))
def test_the_arrival_rate_follows_the_last_ten_seconds(gaps: list[float]) -> None:
    arrivals, now_s = ArrivalEstimator(), 0.0
    for gap_s in gaps:
        now_s += gap_s
        arrivals.arrival(None, now_s)
    expected = sum(math.exp(-(now_s - at_s) / 10.0) for at_s in _times(gaps)) / 10.0
    assert arrivals.rate_per_s(now_s) == pytest.approx(expected, rel=1e-6)
    assert arrivals.rate_per_s(now_s + 100.0) < 0.001 * arrivals.rate_per_s(now_s)
    assert arrivals.rate_per_s(now_s - 5.0) == pytest.approx(expected, rel=1e-6)  # clock back


def _times(gaps: list[float]) -> list[float]:
    times, now_s = [], 0.0
    for gap_s in gaps:
        now_s += gap_s
        times.append(now_s)
    return times


def test_sessions_live_for_a_while_and_are_bounded() -> None:
    arrivals = ArrivalEstimator()
    arrivals.arrival("a", 0.0)
    arrivals.arrival("b", 500.0)
    arrivals.arrival("a", 600.0)
    arrivals.arrival(None, 600.0)
    assert arrivals.live_sessions(600.0) == 2
    assert arrivals.live_sessions(1450.0) == 1
    arrivals.arrival("a", 1450.0, "another tenant")
    assert arrivals.live_sessions(1450.0) == 2
    for n in range(70_000):
        arrivals.arrival(str(n), 1500.0)
    assert arrivals.live_sessions(1500.0) == 1 << 16

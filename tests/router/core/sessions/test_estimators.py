"""Tests of the estimates of speeds and arrival rates, which wrong data must not mislead
for long.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import FirstToken, Progress
from router.core.sessions.arrivals import ArrivalEstimator
from router.core.sessions.speed import SpeedEstimator
from router.core.workers.columns import WorkerColumns
from router.core.workers.ledger import Charge, Ledger, PrefillPeriod
from tests.router.core.core_world import World
from tests.router.property_support import patient


def speeds(rate: float = 15_000.0, step_s: float = 0.015) -> tuple[WorkerColumns, SpeedEstimator]:
    columns = WorkerColumns(1)
    columns.prefill_tokens_per_s[0] = columns.given_tokens_per_s[0] = rate
    columns.step_s[0] = step_s
    return columns, SpeedEstimator(columns)


def charge(uncached: int = 4000, shown: bool = True, dispatched_s: float = 0.0) -> Charge:
    tokens = (uncached, uncached, float(uncached), float(uncached))
    period = PrefillPeriod(dispatched_s, 1, 1, uncached, float(uncached), shown)
    return Charge(1, 0, 0, *tokens, dispatched_s, True, period)


@pytest.mark.parametrize(
    ("true_rate", "true_step_s"),
    [(300.0, 0.2), (15_000.0, 0.015), (15_000.0, 0.2), (1_500_000.0, 0.00015)],
)
def test_speeds_are_learned_over_a_wide_range(true_rate: float, true_step_s: float) -> None:
    """Speeds are learned if they are from 50 times slower to 100 times faster than the
    first guess.
    """
    columns, speed = speeds()
    for _ in range(200):
        speed.first_token(charge(), 4000 / true_rate + columns.step_s[0] / 2)
        speed.token_gap(0, true_step_s)
    assert columns.prefill_tokens_per_s[0] == pytest.approx(true_rate, rel=0.05)
    assert columns.step_s[0] == pytest.approx(true_step_s, rel=0.05)


def test_a_worker_a_hundred_times_faster_is_learned_from_prefills_alone() -> None:
    """The speed of a worker that is a hundred times faster than guessed is learned from prefills
    alone, although its whole prefill is shorter than the half step that is assumed to come before
    it.
    """
    columns, speed = speeds()
    for _ in range(200):
        speed.first_token(charge(), 4000 / 1_500_000.0)
    assert columns.prefill_tokens_per_s[0] > 1_000_000.0


@patient
@given(outliers=st.lists(st.floats(1e-9, 1e9), max_size=3))
def test_few_outliers_move_an_estimate_by_at_most_half_and_then_fade(outliers) -> None:
    columns, speed = speeds()
    for _ in range(10):
        speed.first_token(charge(), 4000 / 15_000 + 0.015 / 2)
    for gap_s in outliers:
        speed.token_gap(0, gap_s)
        speed.first_token(charge(), gap_s)
    assert 0.5 < columns.step_s[0] / 0.015 < 2.0
    assert 0.5 < columns.prefill_tokens_per_s[0] / 15_000.0 < 2.0
    for _ in range(100):
        speed.token_gap(0, 0.015)
    assert columns.step_s[0] == pytest.approx(0.015, rel=0.01)


@pytest.mark.parametrize("sample_s", [1e-300, 1e300])
def test_absurd_samples_keep_estimates_within_their_range(sample_s: float) -> None:
    columns, speed = speeds()
    for _ in range(10_000):
        speed.token_gap(0, sample_s)
        speed.first_token(charge(), sample_s)
    assert 1e-6 <= columns.step_s[0] <= 10.0
    assert 1.0 <= columns.prefill_tokens_per_s[0] <= 1e9


@pytest.mark.parametrize(
    "prefill", [charge(shown=False), charge(uncached=255), charge(dispatched_s=99.0)]
)
def test_answers_without_a_usable_prefill_time_do_not_change_the_speed(prefill: Charge) -> None:
    """Answers without a visible first token, with too short a prefill, or with a first token before
    the request was sent do not change the estimated speed.
    """
    columns, speed = speeds()
    speed.first_token(prefill, 10.0)
    assert columns.prefill_tokens_per_s[0] == 15_000.0


def test_an_absurd_first_sample_has_no_effect_after_three_more() -> None:
    columns, speed = speeds()
    for taken_s in (1e-6, 4.0, 4.0, 4.0):
        speed.first_token(charge(), taken_s + columns.step_s[0] / 2)
    assert columns.prefill_tokens_per_s[0] == pytest.approx(1_000.0, rel=0.1)


def pool_speeds(workers: int) -> tuple[WorkerColumns, SpeedEstimator, Ledger]:
    columns = WorkerColumns(workers)
    columns.prefill_tokens_per_s[:] = columns.given_tokens_per_s[:] = 15_000.0
    columns.step_s[:] = 1e-3
    return columns, SpeedEstimator(columns), Ledger(columns)


def compute_alone(speed: SpeedEstimator, ledger: Ledger, slot: int, rate: float) -> None:
    """Let a worker compute a single prefill of a thousand tokens at this rate."""
    charge = ledger.reserve((slot, "both"), slot, 1_000, 1_000, True, 0.0)
    assert ledger.first_token(charge, 1_000 / rate + 5e-4)
    speed.first_token(charge, 1_000 / rate + 5e-4)
    ledger.release(charge)


@given(noise=st.lists(st.floats(0.85, 1.17), min_size=20, max_size=20))
def test_equally_fast_workers_get_equal_estimates_despite_noise(noise: list[float]) -> None:
    """Workers of equal speed get equal estimates, whatever the noise; otherwise all requests of an
    idle pool would go to the worker that seems fastest.
    """
    columns, speed, ledger = pool_speeds(3)
    for number, wrong in enumerate(noise):
        compute_alone(speed, ledger, number % 2, 1_500.0 * wrong)
    assert columns.prefill_tokens_per_s == pytest.approx(1_500.0, rel=0.25)
    assert len(set(columns.prefill_tokens_per_s.tolist())) == 1, "also the worker without requests"


def test_a_slow_worker_gets_its_own_speed_and_a_new_one_that_of_the_pool() -> None:
    columns, speed, ledger = pool_speeds(4)
    for _ in range(10):
        for slot, rate in enumerate((2_000.0, 2_000.0, 500.0)):
            compute_alone(speed, ledger, slot, rate)
    rates = columns.prefill_tokens_per_s
    assert rates[:3] == pytest.approx([2_000.0, 2_000.0, 500.0], rel=0.02)
    assert 500.0 < rates[3] < 2_000.0


@pytest.mark.parametrize("streams", [2, 5, 8])
def test_speed_is_learned_from_prompts_that_share_a_step(streams: int) -> None:
    """The speed is learned from prompts that are computed together: three prompts share a step, as
    in an engine with a token budget.
    """
    columns, speed, ledger = pool_speeds(1)
    for _ in range(5):
        charges = [
            ledger.reserve((number, "both"), 0, 600, 600, True, 0.0) for number in range(streams)
        ]
        for number, charge in enumerate(charges):
            step = min(number // 3 * 3 + 3, streams)
            now_s = step * 600 / 1_500.0
            assert ledger.first_token(charge, now_s)
            speed.first_token(charge, now_s)
        for charge in charges:
            ledger.release(charge)
    assert columns.prefill_tokens_per_s[0] == pytest.approx(1_500.0, rel=0.05)


def test_speed_is_learned_from_answers_that_do_not_stream() -> None:
    columns, speed, ledger = pool_speeds(1)
    for _ in range(5):
        charge = ledger.reserve((1, "both"), 0, 1_000, 1_000, False, 0.0)
        speed.answered(charge, 20, 1_000 / 1_500.0 + 20 * 1e-3)
        ledger.release(charge)
    assert columns.prefill_tokens_per_s[0] == pytest.approx(1_500.0, rel=0.05)
    long = ledger.reserve((2, "both"), 0, 1_000, 1_000, False, 0.0)
    speed.answered(long, 2_000, 60.0)  # nobody knows how much of it was decode
    assert columns.prefill_tokens_per_s[0] == pytest.approx(1_500.0, rel=0.05)


def test_the_time_of_a_one_token_answer_is_all_prefill() -> None:
    """For an answer of one token, the whole time counts as prefill, whatever length of a step is
    assumed, because there was no decode step.
    """
    columns, speed, ledger = pool_speeds(1)
    columns.step_s[0], true = 0.015, 3.0 * columns.given_tokens_per_s[0]
    for _ in range(10):
        charge = ledger.reserve((1, "both"), 0, 1_000, 1_000, False, 0.0)
        speed.answered(charge, 1, 1_000 / true)
        ledger.release(charge)
    assert columns.prefill_tokens_per_s[0] == pytest.approx(true, rel=0.05)


def test_the_step_time_is_learned_from_short_answers() -> None:
    """The length of a decode step is learned from answers so short that they end before the first
    report of their progress.
    """
    columns, speed, ledger = pool_speeds(1)
    for _ in range(60):
        charge = ledger.reserve((1, "both"), 0, 1_000, 1_000, True, 0.0)
        ledger.first_token(charge, 0.5)
        speed.answered(charge, 24, 0.5 + 23 * 4e-3)
        speed.answered(charge, 3, 60.0)  # too few tell of what is not decode
        ledger.release(charge)
    assert columns.step_s[0] == pytest.approx(4e-3, rel=0.01)


@given(short_s=st.lists(st.floats(0.5, 2.0), min_size=40, max_size=40))
def test_short_prefills_never_make_a_worker_look_too_fast(short_s: list[float]) -> None:
    """Short prefills never make a worker look faster than it is: steps are assumed to take as long
    as two of them, and only the faster ones count.
    """
    columns, speed = speeds(step_s=0.040)
    for wrong in short_s:
        speed.first_token(charge(300), 0.020 * wrong)
    assert columns.prefill_tokens_per_s[0] <= max(15_000.0, 300 / (0.020 * min(short_s))) * 1.001


def test_out_of_order_first_tokens_and_progress_are_ignored() -> None:
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


def test_live_sessions_expire_and_their_number_is_bounded() -> None:
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

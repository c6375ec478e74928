"""Tests of the learned cost of attention, from prefills of different workers, some with wrong
times.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.sessions.speed import SpeedEstimator
from router.core.workers.columns import PairCost, WorkerColumns
from router.core.workers.ledger import Charge, PrefillPeriod
from tests.router.property_support import patient

SPEEDS = (15_000.0, 7_000.0, 30_000.0, 2_000.0)  # tokens a second without attention
PAIR_TOKENS = 4.36e-5  # Qwen3-32B on two H100: 2.36e-6 ms a pair to 0.0541 ms a token
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def learned(
    seed: int, pair_tokens: float, wrong: float = 0.0, samples: int = 2_000
) -> WorkerColumns:
    """Return the learned data of workers after `samples` prefills, of which a share `wrong` had
    arbitrary times.
    """
    rng = random.Random(seed)
    columns = WorkerColumns(len(SPEEDS))
    columns.prefill_tokens_per_s[:] = 15_000.0
    columns.step_s[:] = 1e-4
    speed = SpeedEstimator(columns)
    for _ in range(samples):
        slot = rng.randrange(len(SPEEDS))
        tokens = int(math.exp(rng.uniform(math.log(256), math.log(20_000))))
        cached = rng.choice((0, 0, rng.randrange(100_000)))
        work = tokens * (1.0 + pair_tokens * (cached + tokens / 2))
        took_s = work / SPEEDS[slot] * math.exp(rng.gauss(0.0, 0.05))
        if rng.random() < wrong:  # mostly hits that nobody told of
            took_s *= rng.choice((0.02, 0.05, 0.1, 0.3, 5.0, 20.0))
        took_s += 0.5e-4
        period = PrefillPeriod(0.0, 1, 1, tokens, work)
        charge = Charge(0, slot, slot, tokens + cached, tokens, work, work, 0.0, True, period)
        speed.first_token(charge, took_s)
    return columns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pair_tokens", [PAIR_TOKENS, 5e-4])
def test_the_attention_cost_is_learned_within_five_percent(seed: int, pair_tokens: float) -> None:
    columns = learned(seed, pair_tokens)
    assert columns.attention.pair_tokens == pytest.approx(pair_tokens, rel=0.05)
    assert columns.prefill_tokens_per_s == pytest.approx(SPEEDS, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_no_attention_cost_is_learned_if_there_is_none(seed: int) -> None:
    assert learned(seed, 0.0).attention.pair_tokens < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_one_wrong_time_in_fifty_hardly_changes_the_attention_cost(seed: int) -> None:
    columns = learned(seed, PAIR_TOKENS, wrong=0.02)
    assert columns.attention.pair_tokens == pytest.approx(PAIR_TOKENS, rel=0.15)


@patient
@given(st.lists(st.tuples(st.integers(1, 1 << 21), st.integers(0, 1 << 21), NUMBERS), max_size=200))
def test_the_attention_cost_stays_in_bounds_and_recovers_from_wrong_times(
    samples: list[tuple[int, int, float]],
) -> None:
    cost = PairCost()
    for tokens, cached, linear_tokens in samples:
        cost.prefill(tokens, cached, linear_tokens)
        assert 0.0 <= cost.pair_tokens <= 1e-2
        assert math.isfinite(cost.work(1_000, 1_000))
    rng = random.Random(1)
    for _ in range(4_000):
        tokens, cached = rng.randrange(256, 20_000), rng.randrange(100_000)
        cost.prefill(tokens, cached, tokens * (1.0 + PAIR_TOKENS * (cached + tokens / 2)))
    assert cost.pair_tokens == pytest.approx(PAIR_TOKENS, rel=0.05)


def test_work_is_the_linear_part_plus_attention() -> None:
    cost = PairCost()
    assert cost.work(100, 50) == 100.0
    cost.pair_tokens = 0.01
    assert cost.work(100, 50) == pytest.approx(100 + 0.01 * 100 * (50 + 50))

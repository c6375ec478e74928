"""Tests of `pick`: ties, temperature, and hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.pick import HOLD, pick, ranked

INF = np.inf
draws = st.floats(0.0, 1.0, exclude_max=True)
costs_lists = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(INF)), max_size=9)


@pytest.mark.parametrize(
    ("costs", "draw", "row"),
    [
        ([3.0, 1.0, 2.0], 0.99, 1),
        ([1.0, 1.0, 2.0], 0.0, 0),
        ([1.0, 1.0, 2.0], 0.5, 1),
        ([1.0, 1.0 + 1e-12, 2.0], 0.5, 1),  # equal within rounding
        ([1.0, 1.0 + 1e-6], 0.9, 0),  # different
        ([1e12, 1e12 + 1.0], 0.9, 1),  # equal relative to their size
        ([INF, 5.0, INF], 0.3, 1),
        ([INF, INF], 0.3, HOLD),
        ([], 0.3, HOLD),
        ([-2.0, 0.0], 0.9, 0),
    ],
)
def test_the_lowest_cost_wins_and_ties_are_broken_at_random(costs, draw, row):
    assert pick(np.array(costs, dtype=np.float64), draw) == row


@pytest.mark.parametrize("bad", [np.nan, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_error_names_the_row_of_an_invalid_cost(bad, temperature):
    with pytest.raises(ValueError, match="row 2"):
        pick(np.array([1.0, INF, bad]), 0.5, temperature)
    with pytest.raises(ValueError, match="row 2"):
        ranked(np.array([1.0, INF, bad]), 3)


@pytest.mark.parametrize(("draw", "temperature"), [(1.0, 0.0), (-0.1, 0.0), (0.5, -1.0)])
def test_draw_and_temperature_out_of_range_are_rejected(draw, temperature):
    with pytest.raises(ValueError, match="must be"):
        pick(np.array([1.0]), draw, temperature)


def test_temperature_follows_the_softmax_for_any_unit_of_cost():
    draws = (np.arange(4000) + 0.5) / 4000
    for unit in (1e-3, 1.0, 1e6):
        costs = np.array([0.0, 1.0, 2.0, INF]) * unit
        picked = np.bincount([pick(costs, d, 0.5) for d in draws], minlength=4) / 4000
        weights = np.exp(-np.array([0.0, 0.5, 1.0]) / 0.5)
        assert picked[:3] == pytest.approx(weights / weights.sum(), abs=1e-3)
        assert picked[3] == 0


def test_a_small_temperature_picks_the_lowest_cost():
    assert {pick(np.array([3.0, 1.0, 2.0]), d, 1e-300) for d in (0.0, 0.5, 0.999)} == {1}


def test_ranked_is_best_first_without_the_excluded():
    assert ranked(np.array([4.0, INF, 1.0, 4.0]), 3).tolist() == [2, 0, 3]
    assert ranked(np.array([4.0, 1.0]), 0).tolist() == []


@given(costs_lists, draws, st.sampled_from([0.0, 0.1, 10.0]))
def test_pick_takes_a_finite_row_or_holds(costs, draw, temperature):
    array = np.array(costs, dtype=np.float64)
    row = pick(array, draw, temperature)
    assert (row == HOLD) == (not np.isfinite(array).any())
    if row != HOLD:
        assert np.isfinite(array[row])
        assert temperature or array[row] <= array.min() + 1e-9 * max(1.0, abs(array.min()))

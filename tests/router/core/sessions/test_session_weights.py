"""Tests of the native weights of idle sessions: they equal those of plain numpy bit for bit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkernels import SessionWeights
from policies.contract import Floats, Ints
from router.core.sessions.return_hazard import EDGES_S, ReturnHazard, bins_of
from tests.router.property_support import patient

SLOTS = 3
LEAST, FORGET_S, UNKNOWN_S = 0.02, 900.0, 60.0
NUMBERS = ("serial", "inflight", "home", "bin")
Columns = dict[str, Any]


def table(rows: int, seed: int) -> Columns:
    """Return random sessions: idle or not, with a worker that has their cache or not, recent or
    old.
    """
    rng = np.random.default_rng(seed)
    edge = rng.choice(EDGES_S, rows)
    away_s = np.where(rng.random(rows) < 0.3, edge, rng.exponential(300.0, rows))
    return {
        "serial": rng.integers(0, 4, rows),
        "inflight": rng.integers(0, 2, rows) * rng.integers(0, 3, rows),
        "home": rng.integers(-1, SLOTS, rows),
        "bin": np.full(rows, -1),
        "idle_s": 1_000.0 - away_s,
        "private_tokens": np.round(rng.lognormal(8, 3, rows)) * rng.integers(0, 2, rows),
        "cold_work": rng.lognormal(9, 3, rows) * rng.integers(0, 2, rows),
        "weight": rng.random(rows),
    }


def learned(seed: int) -> ReturnHazard:
    """Return a life table of returns, learned from some returns."""
    hazard, rng = ReturnHazard(), np.random.default_rng(seed)
    for idle_s in rng.exponential(40.0, 30):
        hazard.returned(-1, float(idle_s))
    hazard.renew()
    return hazard


def horizon_s(columns: Columns, rows: Ints, speeds: Floats, capacities: Floats) -> Floats:
    """Return for each session the seconds within which its return saves more than the memory is
    worth meanwhile.
    """
    home = columns["home"][rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.maximum(columns["private_tokens"][rows], 1.0) / capacities[home]
        spans_s: Floats = columns["cold_work"][rows] / speeds[home] / share
    return np.nan_to_num(spans_s, nan=UNKNOWN_S, posinf=FORGET_S)


CAPACITIES = st.sampled_from([1e3, 94_000.0, 3e6, float("nan"), float("inf"), 0.0])


@patient
@given(st.integers(0, 60), st.integers(0, 2**32), st.lists(CAPACITIES, min_size=3, max_size=3))
def test_native_weights_equal_those_of_numpy(
    rows: int, seed: int, given_capacities: list[float]
) -> None:
    columns, hazard = table(rows, seed), learned(seed)
    known = {name: column.copy() for name, column in columns.items()}
    capacities = np.array(given_capacities)
    speeds = np.random.default_rng(seed).lognormal(9, 1, SLOTS)
    weights = SessionWeights(columns, LEAST, FORGET_S, UNKNOWN_S)
    for now_s in (1_000.0, 1_000.4, 1_090.0):
        idle = np.flatnonzero((known["serial"] > 0) & (known["inflight"] == 0))
        away_s = np.maximum(now_s - known["idle_s"][idle], 0.0)
        bins, before = bins_of(away_s), known["bin"][idle]
        count, left, entered = weights.enter_bins(rows, now_s, EDGES_S)
        assert count == len(idle)
        assert (left.tolist(), entered.tolist()) == (
            before[bins > before].tolist(),
            bins[bins > before].tolist(),
        )
        known["bin"][idle] = bins
        at_home = idle[known["home"][idle] >= 0]
        away_s = np.maximum(now_s - known["idle_s"][at_home], 0.0)
        chance = hazard.within(horizon_s(known, at_home, speeds, capacities), away_s)
        known["weight"][at_home] = chance
        unlikely, over = weights.weigh(rows, now_s, EDGES_S, hazard.away, speeds, capacities)
        assert unlikely.tolist() == at_home[chance < LEAST].tolist()
        assert over.tolist() == idle[now_s - known["idle_s"][idle] > FORGET_S].tolist()
        for name, column in known.items():
            assert np.array_equal(columns[name], column), name
        sums = np.full(SLOTS, 5.0), np.full(SLOTS, 5.0)
        weights.sum_up(rows, *sums)
        for found, name in zip(sums, ("private_tokens", "cold_work"), strict=True):
            weighted = known["weight"] * known[name]
            wanted = np.bincount(known["home"] + 1, weighted, minlength=SLOTS + 1)[1:]
            assert np.array_equal(found, wanted)


def test_unused_rows_are_not_changed() -> None:
    columns = table(10, 1)
    before = columns["bin"].copy()
    count, _, _ = SessionWeights(columns, LEAST, FORGET_S, UNKNOWN_S).enter_bins(0, 1.0, EDGES_S)
    assert count == 0
    assert np.array_equal(columns["bin"], before)


def test_the_error_names_the_argument_that_does_not_fit() -> None:
    columns, column = table(10, 1), np.zeros(SLOTS)
    weights = SessionWeights(columns, LEAST, FORGET_S, UNKNOWN_S)
    with pytest.raises(ValueError, match="used must lie within the table"):
        weights.enter_bins(11, 0.0, EDGES_S)
    with pytest.raises(ValueError, match="edges_s must not be empty"):
        weights.enter_bins(10, 0.0, np.zeros(0))
    with pytest.raises(ValueError, match="edges_s and away must have the same length"):
        weights.weigh(10, 0.0, EDGES_S, column, column, column)
    columns["home"][3] = SLOTS
    for call in (
        lambda: weights.weigh(10, 0.0, EDGES_S, EDGES_S, column, column),
        lambda: weights.sum_up(10, column, column),
    ):
        with pytest.raises(ValueError, match="a home must lie within the columns of workers"):
            call()
    fixed = column.copy()
    fixed.flags.writeable = False
    columns["home"][3] = 0
    with pytest.raises(ValueError, match=re.escape("cold_work")):
        weights.sum_up(10, column, fixed)


@pytest.mark.parametrize("name", ["bin", "weight"])
def test_a_read_only_table_is_rejected(name: str) -> None:
    columns = table(4, 1)
    columns[name].flags.writeable = False
    with pytest.raises(ValueError, match=name):
        SessionWeights(columns, LEAST, FORGET_S, UNKNOWN_S)


@pytest.mark.parametrize("name", sorted(table(0, 0)))
def test_a_table_with_wrong_columns_is_rejected(name: str) -> None:
    columns = table(4, 1)
    short = {**columns, name: columns[name][:3]}
    with pytest.raises(ValueError, match="must have the same length"):
        SessionWeights(short, LEAST, FORGET_S, UNKNOWN_S)
    other = np.float64 if name in NUMBERS else np.int64
    with pytest.raises(TypeError, match=name):
        SessionWeights({**columns, name: columns[name].astype(other)}, LEAST, FORGET_S, UNKNOWN_S)
    del columns[name]
    with pytest.raises(KeyError):
        SessionWeights(columns, LEAST, FORGET_S, UNKNOWN_S)

"""Tests of the chance that an idle session returns, a life table, compared with one counted from
the raw history.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.sessions import return_hazard
from router.core.sessions.return_hazard import EDGES_S, ReturnHazard, bins_of
from tests.router.property_support import patient

PERIODS = st.lists(st.tuples(st.floats(0.0, 2_000.0), st.booleans()), max_size=60)
LOOKS = st.lists(st.floats(0.0, 2_000.0), max_size=6)


def hazard_after(periods: list[tuple[float, bool]], looks_s: list[float]) -> ReturnHazard:
    """Return the life table after idle periods (seconds, whether a request ended it), all from time
    0, seen at the given times.
    """
    hazard = ReturnHazard()
    bins = np.full(len(periods), -1)
    lengths = np.array([length for length, _ in periods])
    for look_s in sorted(looks_s):
        here = np.flatnonzero(lengths >= look_s)
        now = bins_of(np.full(len(here), look_s))
        moved = now > bins[here]
        hazard.entered(bins[here][moved], now[moved])
        bins[here] = now
    for number, (length_s, came_back) in enumerate(periods):
        if came_back:
            hazard.returned(int(bins[number]), length_s)
        else:  # it was last seen idle
            hazard.entered(bins[number : number + 1], bins_of(np.array([length_s])))
    hazard.renew()
    return hazard


def life_table(periods: list[tuple[float, bool]]) -> tuple[list[float], list[float]]:
    """Return for each bin of idle time the sessions that were still idle and those that returned,
    counted one by one.
    """
    risk, back = [2.0] * len(EDGES_S), [0.5] * len(EDGES_S)
    for length_s, came_back in periods:
        last = max(b for b, start_s in enumerate(EDGES_S) if start_s <= length_s)
        for b in range(last + 1):
            risk[b] += 1
        back[last] += came_back
    return risk, back


def survival(risk: list[float], back: list[float], idle_s: float) -> float:
    """Return the share of sessions that have not returned after `idle_s`, by the life table; within
    a bin, its logarithm falls linearly.
    """
    logs = 0.0
    for b, (start_s, end_s) in enumerate(pairwise(EDGES_S.tolist())):
        part = min(max((idle_s - start_s) / (end_s - start_s), 0.0), 1.0)
        logs += part * math.log(1.0 - min(back[b] / risk[b], 0.999))
    return math.exp(logs)


@patient
@given(PERIODS, LOOKS, st.floats(0.0, 1_500.0), st.floats(0.0, 1_500.0))
def test_the_hazard_equals_the_life_table_of_the_raw_history(
    periods: list[tuple[float, bool]], looks_s: list[float], idle_s: float, span_s: float
) -> None:
    hazard = hazard_after(periods, looks_s)
    risk, back = life_table(periods)
    assert hazard._risk.tolist() == pytest.approx(risk)
    assert hazard._returns.tolist() == pytest.approx(back)
    chance = float(hazard.within(np.array([span_s]), np.array([idle_s]))[0])
    left = survival(risk, back, idle_s + span_s) / survival(risk, back, idle_s)
    assert chance == pytest.approx(1.0 - left, abs=1e-8)
    assert 0.0 <= chance <= 1.0
    at_once = float(hazard.within(np.array([span_s]), np.array([0.0]))[0])
    assert hazard.soon(span_s) == pytest.approx(at_once, abs=2e-9)


def test_there_are_two_bins_per_octave_and_the_last_bin_is_open() -> None:
    assert bins_of(np.array([0.0, 0.2499, 0.25, 0.4, 0.5, 1023.0, 1024.0, 1e9])).tolist() == [
        *(0, 0, 1, 2, 3),
        *(24, 25, 25),
    ]
    assert EDGES_S[-1] == 1024.0


def test_the_chance_of_a_return_follows_the_traffic() -> None:
    """The chance of a return follows the traffic, in which sessions return after 2 to 4 s and a
    third of them never does.
    """
    rng, hazard = random.Random(3), ReturnHazard()
    for _ in range(3_000):
        if rng.random() < 2 / 3:
            hazard.returned(-1, rng.uniform(2.0, 4.0))
        else:
            hazard.entered(np.array([-1]), bins_of(np.array([900.0])))
    hazard.renew()

    def within(span_s: float, idle_s: float) -> float:
        return float(hazard.within(np.array([span_s]), np.array([idle_s]))[0])

    assert within(8.0, 0.0) == pytest.approx(2 / 3, abs=0.03)
    assert within(1.0, 0.0) < 0.01
    assert within(4.0, 2.0) == pytest.approx(2 / 3, abs=0.03)
    assert within(100.0, 6.0) < 0.02


def test_old_returns_lose_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(return_hazard, "_RISK_MAX", 100.0)
    hazard = ReturnHazard()
    for _ in range(1_000):
        hazard.returned(-1, 0.1)
        hazard.renew()
    assert hazard._risk[0] <= 101.0
    for _ in range(400):
        hazard.entered(np.array([-1]), np.array([25]))
        hazard.renew()
    assert float(hazard.within(np.array([0.25]), np.array([0.0]))[0]) < 0.1

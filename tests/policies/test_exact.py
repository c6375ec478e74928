"""Tests that optimized code gives the same result to the last bit as the plain formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.hybrid import Hybrid
from policies.pick import TIE, pick
from policies.thresholds import reached_thresholds
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of
from tests.policies.views import fleets, requests

INF = np.inf


def plain_missing(prompt_tokens: int, hit_tokens: np.ndarray) -> np.ndarray:
    """Return the price of the missing tokens, computed with numpy's general functions."""
    hits = np.minimum(hit_tokens, prompt_tokens - 1)
    order = np.argsort(hits, kind="stable")
    priced = np.cumsum(np.diff(hits[order], prepend=0) / np.arange(len(hits), 0, -1))
    held = np.empty(len(hits))
    held[order] = priced
    return priced.max(initial=0.0) - held + (prompt_tokens - hits.max(initial=0))


def plain_reached(fleet, defaults) -> np.ndarray:
    """Return bool[rows]: whether each worker has reached a threshold, with each limit
    written out.
    """
    signals = (fleet.requests, fleet.queued_prefill_tokens, fleet.kv_fraction)
    owns = (fleet.max_requests, fleet.max_queued_tokens, fleet.max_kv_fraction)
    reached = np.zeros(len(fleet), dtype=bool)
    for signal, own, default in zip(signals, owns, defaults, strict=True):
        limit = np.where(np.isnan(own), INF if default is None else default, own)
        reached |= signal >= limit
    return np.zeros(len(fleet), dtype=bool) if reached.all() else reached


@settings(max_examples=examples(200))
@given(hits=st.lists(st.integers(0, 3_000), max_size=12), prompt_tokens=st.integers(1, 2_500))
def test_missing_tokens_equal_the_plain_formula(hits, prompt_tokens) -> None:
    fleet = fleet_of(hit_tokens=np.array(hits, dtype=np.int64))
    missing = fleet.missing_tokens(prompt_tokens)
    assert missing.tolist() == plain_missing(prompt_tokens, fleet.hit_tokens).tolist()


limits = st.one_of(st.none(), st.floats(1.0, 1e4))


@settings(max_examples=examples(150))
@given(
    request=requests,
    fleet=fleets(),
    defaults=st.tuples(limits, limits, st.one_of(st.none(), st.floats(0.01, 1.0))),
)
def test_hybrid_costs_equal_the_plain_formula(request, fleet, defaults) -> None:
    reached = reached_thresholds(fleet, *defaults)
    expected = plain_reached(fleet, defaults)
    assert expected.tolist() == ([False] * len(fleet) if reached is None else reached.tolist())
    step_tokens = np.median(fleet.step_s * fleet.prefill_tokens_per_s)
    load_tokens = fleet.queued_prefill_tokens + (fleet.running + fleet.waiting) * step_tokens
    work_tokens = plain_missing(request.prompt_tokens, fleet.hit_tokens) + 2.0 * load_tokens
    costs = np.where(expected, INF, work_tokens / fleet.prefill_tokens_per_s)
    assert Hybrid(2.0, *defaults).costs(request, fleet, None).tolist() == costs.tolist()


costs_lists = st.lists(
    st.one_of(st.integers(0, 3).map(float), st.floats(-1e6, 1e6), st.just(INF)), max_size=9
)


@settings(max_examples=examples(300))
@given(costs=costs_lists, draw=st.floats(0.0, 1.0, exclude_max=True))
def test_pick_among_ties_equals_the_plain_rule(costs, draw) -> None:
    finite = [(cost, row) for row, cost in enumerate(costs) if cost < INF]
    if not finite:
        assert pick(np.array(costs), draw) == -1
        return
    best = min(finite)[0]
    ties = [row for cost, row in finite if cost - best <= TIE * max(1.0, abs(best))]
    assert pick(np.array(costs), draw) == ties[int(draw * len(ties))]


def test_an_unknown_step_time_is_an_error_and_not_hidden_by_the_median() -> None:
    """An unknown speed is not hidden by a median: every cost is NaN, and `pick` raises an error
    that says so.
    """
    fleet = fleet_of(step_s=[0.01, float("nan"), 0.02], running=[1, 1, 1])
    costs = Hybrid().costs(request_of(), fleet, None)
    with pytest.raises(ValueError, match="row 0"):
        pick(costs, 0.5)

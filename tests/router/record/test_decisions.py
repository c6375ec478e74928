"""Tests of the log of decisions: it keeps the same facts of decisions over small and over large
pools.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from router.core.contract.actions import Decision, Dispatch, Ranking, Stage
from router.record.request_record import Attempt, LatestAttempts
from tests.router.record.record_log_support import arrival

POOLS = (1, 3, 64, 65, 200)


def decision(workers: int) -> tuple[Decision, weakref.ref[object]]:
    """Return a decision over a pool and a weak reference that shows whether its array of costs is
    still kept.
    """
    draws = np.random.default_rng(workers)
    costs = draws.random(workers)
    ranking = Ranking(range(10, 10 + workers), costs, draws.integers(0, 99, workers), 0)
    return Decision("p", "policy", 1, 2, ranking, False), weakref.ref(costs)


@pytest.mark.parametrize("workers", POOLS)
def test_a_decision_read_later_has_the_same_candidates(workers: int) -> None:
    kept, _ = decision(workers)
    LatestAttempts().add(Attempt(arrival(), Dispatch(1, (Stage(10, "both"),), kept), 0.0))
    assert kept.candidates == decision(workers)[0].candidates
    assert len(kept.candidates) == min(workers, 3)
    assert kept.candidates[0].worker_id == 10


@pytest.mark.parametrize("workers", POOLS)
def test_all_costs_are_kept_only_for_small_pools(workers: int) -> None:
    kept, costs = decision(workers)
    LatestAttempts().add(Attempt(arrival(), Dispatch(1, (Stage(10, "both"),), kept), 0.0))
    gc.collect()
    assert (costs() is not None) == (workers <= 64)

"""Tests of DualMap, Prequal and LBGR against costs computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.facts import Arrival, Dispatched, Failure, Finish, FirstToken, WorkerChange
from policies.pick import pick
from policies.published.dualmap import DualMap
from policies.published.hashing import weights
from policies.published.lanes import DECAY
from policies.published.lbgr import Lbgr
from policies.published.prequal import Prequal
from tests.policies.fleet import fleet_of, request_of

INF = math.inf
NO_CHAIN = np.zeros(0, dtype=np.uint64)


def after(policy, *facts):
    state = policy.initial_state()
    for fact in facts:
        state = policy.observe(fact, state)
    return state


def costs_of(policy, state=None, request=None, **columns):
    state = policy.initial_state() if state is None else state
    return policy.costs(request or request_of(), fleet_of(**columns), state).tolist()


def sent(request_id, worker_id, now_s=0.0, uncached=1_000):
    return Dispatched(now_s, request_id, worker_id, 0, uncached, NO_CHAIN)


def joined(*worker_ids):
    return [WorkerChange(0.0, worker_id, "ready") for worker_id in worker_ids]


def arrived(chain):
    return Arrival(0.0, 0, "m", 16 * len(chain), {16: np.array(chain, dtype=np.uint64)})


# --- rendezvous ---------------------------------------------------------------------------------


def test_only_the_keys_of_a_worker_that_leaves_are_moved():
    ids, fewer = np.arange(8), np.array([0, 1, 2, 4, 5, 6, 7])
    homes = [int(weights(key, ids, 1).argmax()) for key in range(4_000)]
    left = [int(fewer[weights(key, fewer, 1).argmax()]) for key in range(4_000)]
    assert all(new == old for old, new in zip(homes, left, strict=True) if old != 3)
    assert np.bincount(homes, minlength=8).min() > 400  # 500 expected of each
    other_seed = [int(weights(key, ids, 2).argmax()) for key in range(4_000)]
    assert sum(a == b for a, b in zip(homes, other_seed, strict=True)) < 600  # 500 by chance


# --- DualMap ------------------------------------------------------------------------------------


def candidates(costs):
    return sorted(np.flatnonzero(np.isfinite(costs)).tolist())


def test_dualmap_takes_the_worker_with_more_hits_while_it_meets_the_slo():
    policy, eight = DualMap(ttft_slo_s=2.0), {"worker_id": range(8)}
    first, second = candidates(costs_of(policy, **eight))
    hits, queued = [0] * 8, [0.0] * 8
    hits[second] = 640
    assert costs_of(policy, **eight, hit_tokens=hits)[second] == -1.0
    # 360 missing tokens at 10,000/s are 36 ms: 1.964 s may be queued before it.
    for queued_tokens, expected in ((19_640.0, -1.0), (19_650.0, 1.965)):
        queued[second] = queued_tokens
        costs = costs_of(policy, **eight, hit_tokens=hits, queued_prefill_tokens=queued)
        assert costs[second] == pytest.approx(expected)
        assert costs[first] == 0.0
        assert candidates(costs) == [first, second]


def test_dualmap_compares_queues_if_both_workers_have_equal_hits():
    policy, eight = DualMap(), {"worker_id": range(8)}
    first, second = candidates(costs_of(policy, **eight))
    queued = [50_000.0] * 8
    queued[first] = 20_000.0
    costs = costs_of(policy, **eight, hit_tokens=500, queued_prefill_tokens=queued)
    assert (costs[first], costs[second]) == (2.0, 5.0)


def test_dualmap_compares_all_queues_for_prompts_shorter_than_the_head():
    short = request_of(prompt_tokens=63)  # three full blocks, and the head is four
    queued = [100.0, 0.0, 300.0]
    costs = costs_of(DualMap(), None, short, queued_prefill_tokens=queued)
    assert costs == pytest.approx([0.01, 0.0, 0.03])
    assert costs_of(DualMap(), hit_tokens=[0], queued_prefill_tokens=[70.0]) == [0.007]


def pairs_of(policy, prompts, workers=8):
    """Return the pairs of candidate workers that the prompts have after all of them arrived."""
    state = after(policy, *map(arrived, prompts))
    chains = (np.array(prompt, dtype=np.uint64) for prompt in prompts)
    requests = (request_of(chain=chain, prompt_tokens=16 * len(chain)) for chain in chains)
    views = (policy.costs(r, fleet_of(worker_id=range(workers)), state) for r in requests)
    return {tuple(candidates(costs)) for costs in views}


def shared(blocks, own, number):
    trunk = list(range(1, blocks + 1))
    return trunk + [1_000_000 * (number + 1) + block for block in range(own)]


def test_dualmap_hashes_more_blocks_of_a_hot_prompt():
    """DualMap hashes more blocks of a prompt that many requests share. Five blocks are shared and
    eight are not, so the second depth tells requests apart.
    """
    prompts = [shared(5, 6, number) for number in range(40)]
    assert len(pairs_of(DualMap(), prompts)) > 8
    cold = prompts[:1] + [[10_000 + 100 * n + b for b in range(8)] for n in range(40)]
    assert len({*pairs_of(DualMap(), cold[:1]), *pairs_of(DualMap(), prompts[:1])}) == 1


@pytest.mark.parametrize(("continuous", "most"), [(False, 1), (True, 28)])
def test_dualmap_spreads_hot_prompts_that_end_between_two_doublings(continuous, most):
    """A prompt with 40 shared blocks and 20 own ones ends between two doublings: 32 blocks are
    alike for all, and 64 no prompt has. Without `continuous`, two workers serve all such prompts.
    """
    pairs = pairs_of(DualMap(continuous=continuous), [shared(40, 20, n) for n in range(100)])
    assert len(pairs) == 1 if most == 1 else 14 < len(pairs) <= most


def test_dualmap_drops_requests_outside_its_window():
    policy = DualMap(window_requests=10)
    state = after(policy, *(arrived(shared(5, 6, n)) for n in range(30)))
    assert len(state.requests) == 10
    assert state.counts[4] == 10
    for number in range(10):
        policy.observe(arrived([500 + 10 * number + block for block in range(8)]), state)
    assert sum(state.counts.values()) == 20  # ten requests with heads at four and eight blocks
    assert 4 not in state.counts


# --- Prequal ------------------------------------------------------------------------------------


def test_prequal_probes_three_workers_and_takes_the_fastest_at_first():
    columns = {"queued_prefill_tokens": np.arange(8) * 100.0, "running": range(8)}
    costs = costs_of(Prequal(), None, request_of(draw=0.3), **columns)
    assert len(candidates(costs)) == 3
    assert all(costs[row] == pytest.approx(0.01 * row + 0.01) for row in candidates(costs))
    drawn = {
        tuple(candidates(costs_of(Prequal(), None, request_of(draw=n / 64), **columns)))
        for n in range(64)
    }
    assert len(drawn) > 20  # of 56 that there are


def test_prequal_excludes_hot_workers_while_one_worker_is_cold():
    policy = Prequal(probes=4, pool_probes=4, rif_quantile=0.5)
    state = after(policy, *joined(0, 1, 2, 3), *(sent(n, n // 2) for n in range(8)))
    assert [inflight for _, inflight, _ in state.pool] == [2, 2, 2, 2]
    columns = {"running": [3, 2, 1, 5], "queued_prefill_tokens": [0.0, 500.0, 900.0, 0.0]}
    assert costs_of(policy, state, **columns) == pytest.approx([INF, 0.06, 0.1, INF])
    hot = {"running": [3, 4, 9, 5], "queued_prefill_tokens": [9e4, 0.0, 0.0, 0.0]}
    assert costs_of(policy, state, **hot) == [3.0, 4.0, 9.0, 5.0]


def test_prequal_quantile_is_a_rank_in_the_pool():
    policy = Prequal(probes=1, pool_probes=16)
    requests = [sent(n, n % 4) for n in range(16)]
    state = after(policy, *joined(0, 1, 2, 3), *requests)
    assert [inflight for _, inflight, _ in state.pool] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    # ceil(0.84 * 16) = 14: the fourteenth of sixteen is 4.
    assert np.isfinite(costs_of(policy, state, running=[4, 4, 4, 5])).tolist() == [1, 1, 1, 0]


def test_prequal_drops_old_probes_and_removed_workers():
    policy = Prequal()
    state = after(policy, *joined(*range(8)), *(sent(n, n % 8) for n in range(24)))
    assert len(state.pool) == 16
    assert len(candidates(costs_of(policy, state, worker_id=range(8)))) == 8
    late = request_of(now_s=1.5)
    assert len(candidates(costs_of(policy, state, late, worker_id=range(8)))) == 3
    for number in range(24):
        policy.observe(Finish(1.0, number), state)
    assert set(state.inflight.values()) == {0}
    assert not state.worker_of
    policy.observe(WorkerChange(1.0, 3, "gone"), state)
    assert 3 not in state.workers
    policy.observe(Failure(1.0, 99, "client"), state)  # one that was never sent


# --- LBGR ---------------------------------------------------------------------------------------


def test_lbgr_adds_prefill_queue_and_residual_time():
    policy = Lbgr(slope_ms=100.0)
    state = after(policy, sent(0, 0, 0.0, uncached=4_000))  # 400 ms on worker 0
    request = request_of(now_s=0.04)  # two decays of 31/32 later
    costs = costs_of(policy, state, request, hit_tokens=[600, 0])
    assert costs == pytest.approx([40.0 + 400.0 * DECAY**2, 100.0])
    policy.observe(Finish(0.04, 0), state)
    # The answer took 40 ms and was worth 400: the residual is at least 1 ms.
    assert costs_of(policy, state, request, hit_tokens=[600, 0]) == pytest.approx([41.0, 100.0])


def test_lbgr_learns_the_time_of_a_worker_beyond_its_prefill():
    policy = Lbgr(slope_ms=100.0)
    state = after(policy, sent(0, 0, 0.0), Finish(1.1, 0))  # 1,100 ms of which 100 are its prefill
    assert state.of[0].residual_ms == pytest.approx(1_000.0, rel=1e-5)
    policy.observe(sent(1, 0, 10.0), state)
    policy.observe(Finish(10.6, 1), state)
    # P was 1e6 x (1 - gain) / 0.95, about 1: gain 1 / (1 + 0.95).
    assert state.of[0].residual_ms == pytest.approx(1_000.0 - 500.0 / 1.95, rel=1e-4)
    early = Lbgr(slope_ms=100.0, first_token=True)
    state = after(early, sent(0, 0, 0.0), FirstToken(0.4, 0), Finish(1.1, 0))
    assert state.of[0].residual_ms == pytest.approx(300.0, rel=1e-5)


def test_lbgr_leaves_the_cached_worker_by_work_and_never_by_a_count():
    policy, columns = Lbgr(), {"hit_tokens": [6_000, 0]}
    request = request_of(prompt_tokens=6_700)
    busy = {**columns, "running": [10_000, 0]}
    assert pick(np.array(costs_of(policy, None, request, **busy)), 0.0) == 0
    for uncached, row in ((5_900, 0), (6_100, 1)):
        state = after(policy, sent(0, 0, 0.0, uncached=uncached))
        assert pick(np.array(costs_of(policy, state, request, **columns)), 0.0) == row


def test_lbgr_subtracts_work_that_failed_or_was_sent_elsewhere():
    policy = Lbgr()
    state = after(policy, sent(0, 0), sent(1, 0), Failure(0.5, 0, "worker", retry=True))
    assert state.of[0].queued_ms(0.5) == pytest.approx(1_000.0 * DECAY**25)
    assert state.of[0].residual_ms == 0.0  # a failure teaches nothing
    policy.observe(sent(1, 1, 1.0), state)
    assert state.of[0].queued_ms(1.0) == pytest.approx(0.0, abs=1e-9)
    policy.observe(WorkerChange(2.0, 1, "gone"), state)
    policy.observe(Finish(2.0, 1), state)
    assert set(state.of) == {0}
    assert not state.sent


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (DualMap, {"head_blocks": 0}),
        (DualMap, {"window_requests": 200_000}),
        (DualMap, {"ttft_slo_s": INF}),
        (Prequal, {"rif_quantile": 1.5}),
        (Prequal, {"pool_probes": 0}),
        (Prequal, {"probes": -1}),
        (Prequal, {"age_s": 0.0}),
        (Lbgr, {"slope_ms": 0.0}),
        (Lbgr, {"forgetting": 1.01}),
    ],
)
def test_invalid_parameters_are_rejected(kind, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        kind(**bad)

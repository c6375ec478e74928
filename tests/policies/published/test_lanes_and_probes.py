"""Tests of the state that DualMap, Prequal and LBGR keep, against plain accounts of the
same facts.
"""

from __future__ import annotations

import math
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Dispatched, Failure, Finish, Prefilled, WorkerChange
from policies.published.lanes import DECAY, DECAYS_PER_S
from policies.published.lbgr import Lbgr
from policies.published.prequal import Prequal
from policies.published.recent import HeadWindow
from tests.effort import examples

NO_CHAIN = np.zeros(0, dtype=np.uint64)
heads = st.lists(st.integers(0, 5), max_size=4)


@settings(max_examples=examples(100))
@given(st.integers(1, 6), st.lists(heads, max_size=20))
def test_prompt_heads_are_counted_only_within_the_window(size, requests):
    window, kept = HeadWindow(size), deque(maxlen=size)
    for request in requests:
        window.add(request)
        kept.append(request)
        assert window.counts == dict(Counter(head for one in kept for head in one))
        share = Counter(head for one in kept for head in one)
        if request:
            cool = [head for head in request if share[head] <= 0.5 * len(kept)]
            assert window.coolest(request, 0.5) == (cool or request[-1:])[0]


# Events of six requests on three workers: sent (again), finished, failed, worker gone.
events = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "finish", "fail", "gone", "join"]),
        st.integers(0, 5),
        st.integers(0, 2),
        st.floats(0.0, 0.5),
    ),
    max_size=40,
)


def facts_of(history):
    """Yield the facts of a history, whose times increase."""
    now_s = 0.0
    for what, request_id, worker_id, pause_s in history:
        now_s += pause_s
        if what == "send":
            sent = Dispatched(now_s, request_id, worker_id, 0, 100 * request_id, NO_CHAIN)
            yield sent
        elif what == "finish":
            yield Finish(now_s, request_id)
        elif what == "fail":
            yield Failure(now_s, request_id, "worker")
        else:
            yield WorkerChange(now_s, worker_id, "gone" if what == "gone" else "ready")


def test_the_two_legs_of_a_request_end_separately():
    """The prefill and the decode of one request, which begin at once at two workers, end one by one
    in the policy's state.
    """
    policy = Prequal()
    state = policy.initial_state()
    for worker_id, leg in enumerate(("decode", "prefill")):
        policy.observe(Dispatched(0.0, 1, worker_id, 0, 9, NO_CHAIN, leg=leg), state)
    assert state.inflight == {0: 1, 1: 1}
    policy.observe(Prefilled(1.0, 1), state)
    assert state.inflight == {0: 1, 1: 0}
    policy.observe(Dispatched(1.0, 2, 1, 0, 9, NO_CHAIN, leg="prefill"), state)
    policy.observe(Failure(2.0, 2, "client", leg="prefill"), state)
    policy.observe(Finish(2.0, 1), state)
    assert state.inflight == {0: 0, 1: 0}
    assert not state.worker_of


@settings(max_examples=examples(100))
@given(events)
def test_prequal_counts_requests_in_flight_at_known_workers(history):
    policy = Prequal(pool_probes=5)
    state, where, there = policy.initial_state(), {}, {}
    for fact in facts_of(history):
        policy.observe(fact, state)
        if isinstance(fact, Dispatched):
            where[fact.request_id] = fact.worker_id
            there[fact.worker_id] = None  # a dispatch makes it known, too
        elif isinstance(fact, WorkerChange) and fact.state == "gone":
            there.pop(fact.worker_id, None)
        elif isinstance(fact, WorkerChange):
            there[fact.worker_id] = None
        else:
            where.pop(fact.request_id, None)
        assert state.worker_of == {(number, "both"): at for number, at in where.items()}
        assert set(state.workers) == there.keys()
        counts = Counter(where.values())
        assert state.inflight == {worker: counts[worker] for worker in there}
        assert len(state.pool) <= 5


@settings(max_examples=examples(100))
@given(events)
def test_the_lbgr_queue_equals_the_remaining_work_of_running_requests(history):
    policy = Lbgr(slope_ms=100.0)
    state, open_requests, now_s = policy.initial_state(), {}, 0.0
    for fact in facts_of([event for event in history if event[0] not in ("gone", "join")]):
        policy.observe(fact, state)
        now_s = fact.now_s
        if isinstance(fact, Dispatched):
            own_ms = max(fact.uncached_tokens / 10.0, 1.0)
            open_requests[fact.request_id] = (fact.worker_id, now_s, own_ms)
        else:
            open_requests.pop(fact.request_id, None)
        for worker_id, lane in state.of.items():
            left = math.fsum(
                own_ms * DECAY ** ((now_s - sent_s) * DECAYS_PER_S)
                for worker, sent_s, own_ms in open_requests.values()
                if worker == worker_id
            )
            assert lane.queued_ms(now_s) == pytest.approx(left, abs=1e-6)
            assert 0.0 <= lane.residual_ms < 1e6
            assert lane.variance > 0.0

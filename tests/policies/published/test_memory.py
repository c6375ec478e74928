"""Tests of the state of published rules, and of the orders that they make, against plain
implementations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Arrival, Dispatched, Fact, Finish, WorkerChange
from policies.published.chwbl import Chwbl
from policies.published.homes import InsertedTokens, SessionHomes
from policies.published.order import places
from policies.published.prefix_hash import PrefixHash
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of

NO_CHAIN = np.zeros(0, dtype=np.uint64)
WORKERS = range(5)


def dispatched(worker_id: int, tokens: int, session: str | None) -> Fact:
    return Dispatched(1.0, 1, worker_id, 0, tokens, NO_CHAIN, session)


facts_told = st.lists(
    st.one_of(
        st.builds(
            dispatched,
            st.sampled_from(WORKERS),
            st.integers(0, 600),
            st.one_of(st.none(), st.sampled_from("abcdefgh")),
        ),
        st.builds(WorkerChange, st.just(1.0), st.sampled_from(WORKERS), st.just("gone")),
        st.builds(WorkerChange, st.just(1.0), st.sampled_from(WORKERS), st.just("draining")),
        st.just(Finish(1.0, 1)),
        st.just(Arrival(1.0, 1, "m", 9, {}, session="a")),
    ),
    max_size=40,
)


def test_sessions_with_one_name_and_different_tenants_are_separate() -> None:
    homes = SessionHomes(8)
    for worker_id, tenant in enumerate(("a", "b", None)):
        homes.observe(Dispatched(1.0, 1, worker_id, 0, 9, NO_CHAIN, "s", tenant))
    fleet = fleet_of(worker_id=[0, 1, 2])
    for worker_id, tenant in enumerate(("a", "b", None)):
        rows = homes.rows(request_of(session="s", tenant=tenant), fleet)
        assert rows is not None
        assert rows.tolist() == [n == worker_id for n in range(3)]
    assert homes.rows(request_of(session="s", tenant="c"), fleet) is None


@settings(max_examples=examples(200))
@given(facts=facts_told, bound=st.integers(1, 6), eligible=st.sets(st.sampled_from(WORKERS)))
def test_only_the_most_recently_used_sessions_have_homes(facts, bound, eligible) -> None:
    homes = SessionHomes(bound)
    uses: list[tuple[str, int]] = []
    for fact in facts:
        homes.observe(fact)
        if isinstance(fact, Dispatched) and fact.session is not None:
            uses.append((fact.session, fact.worker_id))
    latest = dict(uses)
    kept = list(dict.fromkeys(session for session, _ in reversed(uses)))[:bound]
    assert len(homes) == len(kept)
    fleet = fleet_of(worker_id=sorted(eligible))
    for session in (None, *"abcdefgh"):
        rows = homes.rows(request_of(session=session), fleet)
        if session in kept and latest[session] in eligible:
            assert rows is not None
            assert fleet.worker_id[rows].tolist() == [latest[session]]
        else:
            assert rows is None


@settings(max_examples=examples(200))
@given(facts=facts_told, bound=st.sampled_from([1.0, 700.0, math.inf]))
def test_trees_grow_by_uncached_tokens_and_end_with_their_worker(facts, bound) -> None:
    inserted = InsertedTokens(bound)
    for fact in facts:
        inserted.observe(fact)
    expected = []
    for worker_id in WORKERS:
        gone = [n for n, fact in enumerate(facts) if fact == WorkerChange(1.0, worker_id, "gone")]
        since: list[Any] = facts[gone[-1] + 1 if gone else 0 :]
        sent = [f for f in since if isinstance(f, Dispatched) and f.worker_id == worker_id]
        expected.append(min(float(sum(fact.uncached_tokens for fact in sent)), bound))
    assert inserted.sizes(fleet_of(worker_id=list(WORKERS))).tolist() == expected


@settings(max_examples=examples(200))
@given(
    rows=st.lists(
        st.tuples(st.booleans(), st.integers(-3, 3), st.floats(-2.0, 2.0).map(round)), max_size=9
    )
)
def test_ranks_equal_those_of_sorted_tuples(rows) -> None:
    flags = np.array([row[0] for row in rows], dtype=bool)
    ints = np.array([row[1] for row in rows], dtype=np.int64)
    floats = np.array([row[2] for row in rows], dtype=np.float64)
    order = sorted(set(rows))
    assert places(flags, ints, floats).tolist() == [float(order.index(row)) for row in rows]


@settings(max_examples=examples(60))
@given(
    workers=st.integers(1, 9),
    load_factor=st.floats(1.0, 2.0),
    keys=st.lists(st.integers(1, 3), min_size=1, max_size=60),
)
def test_bounded_load_rules_never_exceed_their_bound(workers, load_factor, keys) -> None:
    """No worker exceeds the bound of either bounded-load rule at any arrival, while requests come
    and never end.
    """
    for policy, extra in ((Chwbl(load_factor=load_factor), 0), (PrefixHash(256, load_factor), 1)):
        running = np.zeros(workers, dtype=np.int64)
        for total, key in enumerate(keys, 1):
            chain = np.full(62, key, dtype=np.uint64)
            costs = policy.costs(request_of(chain=chain), fleet_of(running=running), None)
            row = int(costs.argmin())
            running[row] += 1
            # SMG compares the load before the request, so that its owner may have one more.
            assert running[row] <= math.ceil(load_factor * total / workers) + extra

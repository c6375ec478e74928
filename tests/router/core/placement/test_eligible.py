"""Tests of which workers are eligible: the fast code and the plain rule agree, whatever happened to
the pool.
"""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.contract import FleetView, TableFleet
from policies.facts import Failure, LoadReport, Probed, Tick, WorkerChange
from router.core.contract.actions import Decision, Dispatch, Probe, Reject
from router.core.placement.eligible import Eligibility, Rows
from router.core.placement.live_fleet import LiveFleet
from router.core.placement.pending import Pending
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World, chain_of

SLOTS = 8


class PoolMachine(RuleBasedStateMachine):
    """Random histories in which workers join, leave, change and fail; after each step both
    implementations give the same eligible workers.
    """

    @initialize(workers=st.integers(1, 4))
    def start(self, workers: int) -> None:
        self.world = World(workers=workers, ejection_failures=1)
        self.eligibility = Eligibility(self.world.core.workers)
        self.next_id = workers

    @rule(
        models=st.sampled_from([("m",), ("n",), ("m", "n")]),
        block_size=st.sampled_from([BLOCK, BLOCK, 2 * BLOCK]),
        limit=st.sampled_from([None, None, 5, 50]),
        role=st.sampled_from(["both", "both", "prefill"]),
        anew=st.booleans(),
        which=st.integers(0, 3),
        lacks=st.sampled_from([frozenset(), frozenset({"/x"})]),
        denied=st.sampled_from([frozenset(), frozenset(), frozenset({"m"})]),
        revision=st.sampled_from([None, "v1", "v2"]),
    )
    def join(self, models, block_size, limit, role, anew, which, lacks, denied, revision) -> None:
        known = [w.worker_id for w in self.world.core.workers]
        worker_id = known[which % len(known)] if anew and known else self.next_id
        if len(known) < SLOTS or worker_id in known:
            self.next_id += worker_id == self.next_id
            facts = {"models": models, "block_size": block_size, "role": role, "lacks": lacks}
            facts |= {"denied": denied, "revision": revision}
            self.world.join(worker_id, **facts, max_model_tokens=limit)

    @rule(
        which=st.integers(0, 7),
        state=st.sampled_from(["ready", "ready", "draining", "down", "gone"]),
    )
    def change(self, which: int, state: str) -> None:
        known = [w.worker_id for w in self.world.core.workers]
        if known:
            change = WorkerChange(self.world.now_s, known[which % len(known)], state)
            self.world.core.on_worker(change)

    @rule(
        model=st.sampled_from(["m", "n"]),
        blame=st.sampled_from(["worker", "worker", "client", "busy"]),
    )
    def fail(self, model: str, blame: str) -> None:
        chains = {size: chain_of([1]) for size in (BLOCK, 2 * BLOCK)}
        arrival = self.world.arrival([1], model=model, chains=chains)
        (action,) = self.world.core.on_arrival(arrival)
        if isinstance(action, Dispatch):
            busy_s = 1.0 if blame == "busy" else None
            fact = Failure(self.world.now_s, arrival.request_id, blame, busy_s=busy_s)
            self.world.core.on_failure(fact)

    @rule(elapsed_s=st.floats(0.0, 3.0), well=st.booleans())
    def wait(self, elapsed_s: float, well: bool) -> None:
        self.world.now_s += elapsed_s
        for action in self.world.core.on_tick(Tick(self.world.now_s)):
            if isinstance(action, Probe):
                self.world.core.on_probed(Probed(self.world.now_s, action.worker_id, well))

    @invariant()
    def both_implementations_agree(self) -> None:
        for model in ("m", "n", "unknown"):
            for sizes in ((BLOCK,), (BLOCK, 2 * BLOCK)):
                for blocks, approximate, tried, needs in (
                    (1, False, (), None),
                    (2, True, (), None),
                    (20, False, (0,), None),
                    (1, False, (), "/x"),
                ):
                    arrival = self.world.arrival(
                        list(range(blocks)),
                        model=model,
                        chains={size: chain_of([1]) for size in sizes},
                        approximate=approximate,
                        needs=needs,
                    )
                    pending = Pending(arrival, 0, 0.5, tried=set(tried))
                    self.agree(pending)
                    self.prefers_its_revision(pending)

    def prefers_its_revision(self, pending: Pending) -> None:
        """Check that the workers of the request's revision are eligible if any can take it, and
        otherwise all workers of its model.
        """
        others = self.eligibility.rows_uncached(pending)
        arrival = dataclasses.replace(pending.arrival, revision="v1")
        pending = Pending(arrival, 0, 0.5, tried=pending.tried)
        self.agree(pending)
        found = self.eligibility.rows(pending)
        if isinstance(others, Reject):
            assert found == others
            return
        assert isinstance(found, Rows)
        assert isinstance(others, Rows)
        of_it = [w for w in others.workers if w.facts.revision == "v1" and w.takes_requests]
        if of_it and not any(w.busy for w in of_it):
            assert found.workers == tuple(of_it)
        elif not any(w.facts.revision == "v1" for w in found.workers):
            assert found.worker_ids == others.worker_ids

    def agree(self, pending: Pending) -> None:
        short = self.eligibility.rows(pending)
        whole = self.eligibility.rows_uncached(pending)
        if isinstance(whole, Reject):
            assert short == whole
            return
        assert isinstance(short, Rows)
        assert not any(pending.arrival.needs in w.facts.lacks for w in short.workers)
        assert short.worker_ids == whole.worker_ids
        assert all(a is b for a, b in zip(short.workers, whole.workers, strict=True))
        assert short.block_sizes == whole.block_sizes
        slots = np.arange(SLOTS)
        expected = [w.slot for w in whole.workers]
        assert slots[short.slots].tolist() == slots[whole.slots].tolist() == expected


PoolMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=20, deadline=None
)
TestPool = PoolMachine.TestCase


def fleet(world: World, worker_ids: list[int], now_s: float) -> tuple[LiveFleet, list[int]]:
    rows = Rows.of(w for w in world.core.workers if w.worker_id in worker_ids)
    hits = np.arange(len(rows), dtype=np.int64)
    columns = world.core.columns.read_only()
    slots = [w.slot for w in rows.workers]
    others_s = world.core.caches.others_s
    return LiveFleet(columns, rows, hits, now_s, others_s, 5.0, world.core.arrivals), slots


def busy_world() -> World:
    """Return a world with own requests in both states, and reports of other clients' load, one of
    them old.
    """
    world = World(workers=5, policy="least_requests")
    for n in range(9):
        world.now_s = n * 0.01
        world.core.on_arrival(world.arrival([n, n, n], session=f"s{n % 4}"))
    for worker_id, at_s in ((0, 0.1), (2, 6.0), (3, 6.5)):
        world.core.on_load_report(LoadReport(at_s, worker_id, 7, 3 * worker_id, 100.0 * worker_id))
    return world


# Side by side their columns are shown where they lie; else rows are gathered.
@pytest.mark.parametrize("worker_ids", [[0, 1, 2, 3, 4], [1, 2, 3], [0, 2, 4], [3], []])
@pytest.mark.parametrize("now_s", [7.0, 11.0, 11.6])  # two reports are believed, one, none
def test_every_column_agrees_with_the_ledger_and_the_load_reports(
    worker_ids: list[int], now_s: float
) -> None:
    world = busy_world()
    view, slots = fleet(world, worker_ids, now_s)
    columns = world.core.columns
    seen = {name: getattr(view, name) for name in (f.name for f in dataclasses.fields(TableFleet))}
    fresh = now_s - columns.report_s[slots] <= 5.0
    queued = columns.charged_work[slots] - columns.drained_work[slots]
    own = columns.context_tokens[slots] + queued
    foreign = [
        np.where(fresh, column[slots], 0)
        for column in (columns.foreign_running, columns.foreign_waiting)
    ]
    expected = {
        "worker_id": columns.worker_id[slots],
        "hit_tokens": np.arange(len(slots)),
        "hit_tokens_host": np.zeros(len(slots)),
        "hit_tokens_disk": np.zeros(len(slots)),
        "queued_prefill_tokens": queued,
        "token_work": columns.token_work[slots],
        "running": columns.requests[slots] - columns.waiting[slots] + foreign[0],
        "waiting": columns.waiting[slots] + foreign[1],
        "kv_used_tokens": columns.kv_reported_tokens[slots]
        + np.maximum(own - columns.own_tokens_at_report[slots], 0.0),
        "working_set_tokens": np.zeros(len(slots)),
        "working_set_s": np.zeros(len(slots)),
        "holds_trunk": np.zeros(len(slots), dtype=bool),
        "pair_tokens": 0.0,
        "cycle_s": 0.0,
        "hot_trunk_tokens": 0,
        "copies_missing": 0,
        "load_age_s": now_s - columns.report_s[slots],
        "event_age_s": now_s - columns.event_s[slots],
        "arrival_rate_per_s": world.core.arrivals.rate_per_s(now_s),
        "turnover_per_s": world.core.arrivals.rate_per_s(now_s)
        / max(int(columns.requests.sum()), 1),
        "mean_load_s": float(np.mean(queued / columns.prefill_tokens_per_s[slots]))
        if slots
        else 0.0,
        "live_sessions": 4,
    }
    for name in seen.keys() - expected.keys():
        expected[name] = getattr(columns, name)[slots]
    for name, value in seen.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, err_msg=name)
    np.testing.assert_array_equal(view.requests, view.running + view.waiting)
    assert len(view) == len(slots)


def test_a_policy_can_change_neither_the_ledger_nor_the_view() -> None:
    view, _ = fleet(busy_world(), [0, 1, 2, 3, 4], 7.0)
    with pytest.raises(ValueError, match="read-only"):
        view.prefill_tokens_per_s[0] = 1.0
    with pytest.raises(AttributeError):
        view.step_s = np.zeros(5)  # type: ignore[misc]


def test_a_policy_may_evaluate_another_policy_on_a_changed_view() -> None:
    view, _ = fleet(busy_world(), [0, 1, 2], 7.0)
    changed = view.with_columns(hit_tokens=np.array([9, 9, 9]))
    assert isinstance(changed, FleetView)
    assert changed.hit_tokens.tolist() == [9, 9, 9]
    assert changed.waiting.tolist() == view.waiting.tolist()
    assert view.hit_tokens.tolist() == [0, 1, 2]


def decide(read: bool) -> list[Dispatch]:
    """Return six decisions, each of which is read at once if `read` is true."""
    world = World(workers=4)
    actions = []
    for n in range(6):
        (action,) = world.core.on_arrival(world.arrival([n % 2, n]))
        assert isinstance(action, Dispatch)
        actions.append(action)
        if read:
            assert action.decision.candidates
    return actions


def test_an_explanation_shows_the_load_at_the_time_of_the_decision() -> None:
    """An explanation shows the load at the time of the decision, although it is computed when it is
    read and the load has changed by then.
    """
    late, at_once = decide(read=False), decide(read=True)
    assert late == at_once
    best = [action.decision.candidates for action in late]
    assert best == [action.decision.candidates for action in at_once]
    assert [len(three) for three in best] == [3] * 6
    assert [three[0].worker_id for three in best] == [action.worker_id for action in late]
    assert len({action.worker_id for action in late}) > 1


def test_a_decision_can_be_rebuilt_from_its_parts() -> None:
    """A decision can be split into its parts and rebuilt from their names, as recordings do."""
    action = decide(read=False)[0]
    names = inspect.signature(Decision).parameters
    parts = {name: getattr(action.decision, name) for name in names}
    again = Decision(**parts)
    assert again == action.decision
    assert (hash(again), repr(again)) == (hash(action.decision), repr(action.decision))
    assert Decision(**{**parts, "candidates": ()}) != again


@pytest.mark.parametrize(
    "limits", [{}, {"max_requests": 3.0}, {"max_queued_tokens": 9.0}, {"max_kv_fraction": 0.5}]
)
def test_live_and_table_fleets_agree_on_which_thresholds_exist(limits: dict) -> None:
    world = World(workers=2)
    world.join(2, **limits)
    view, _ = fleet(world, [0, 1, 2], 0.0)
    plain = view.with_columns()
    assert type(plain) is TableFleet
    assert view.has_thresholds == plain.has_thresholds == bool(limits)
    assert view.has_kv_thresholds == plain.has_kv_thresholds == ("max_kv_fraction" in limits)

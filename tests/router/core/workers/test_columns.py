"""Tests of the table of worker data: its model of queues compared with a plain queue, its views,
and clocks that go back.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.contract import FleetView
from policies.facts import LoadReport, WorkerFacts
from router.core.placement.eligible import Rows
from router.core.placement.live_fleet import LiveFleet
from router.core.workers.columns import WorkerColumns
from router.core.workers.ledger import Charge, Ledger
from tests.router.core.core_world import World
from tests.router.property_support import patient

RATE = 100.0  # prefill tokens a second of the modelled worker


class NaiveQueue:
    """A worker that computes prompts one after the other, token by token. Lifetime: test."""

    def __init__(self) -> None:
        self.left: deque[float] = deque()

    def add(self, tokens: int) -> None:
        self.left.append(float(tokens))

    def pass_time(self, seconds: float) -> None:
        if self.left:  # until its first token has come, nobody behind the head has begun
            self.left[0] -= min(self.left[0], seconds * RATE)

    def finish_head(self) -> None:
        self.left.popleft()

    @property
    def tokens(self) -> float:
        return sum(self.left)


def columns_of_one_worker(workers: int = 1) -> tuple[WorkerColumns, Ledger]:
    columns = WorkerColumns(workers)
    for slot in range(workers):
        columns.open(slot, slot)
        facts = WorkerFacts(name="", models=("m",), block_size=16, prefill_tokens_per_s=RATE)
        columns.describe(slot, facts, calibrate=True)
    return columns, Ledger(columns)


def queued(columns: WorkerColumns, slot: int = 0) -> float:
    return float(columns.charged_work[slot] - columns.drained_work[slot])


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 500)),
        st.tuples(st.just("wait"), st.floats(0.0, 5.0)),
        st.tuples(st.just("first token"), st.just(0)),
    ),
    max_size=40,
)


@patient
@given(steps=_steps)
def test_the_modelled_queue_drains_as_a_plain_queue(steps: list[tuple[str, float]]) -> None:
    columns, ledger = columns_of_one_worker()
    naive = NaiveQueue()
    now_s, waiting, next_id = 0.0, deque[Charge](), 0
    for kind, value in steps:
        if kind == "arrive":
            key = next_id, "both"
            waiting.append(ledger.reserve(key, 0, int(value), int(value), True, now_s))
            naive.add(int(value))
            next_id += 1
        elif kind == "wait":
            now_s += value
            ledger.advance(now_s)
            naive.pass_time(value)
        elif waiting:
            naive.finish_head()
            ledger.first_token(waiting.popleft(), now_s)
        assert queued(columns) == pytest.approx(naive.tokens, abs=1e-6)
        assert 0 <= columns.waiting[0] == len(waiting)


def test_a_worker_without_answers_keeps_its_queue() -> None:
    """A worker without free KV memory, whose first request waits for an hour, keeps its whole queue
    in the table.
    """
    columns, ledger = columns_of_one_worker()
    first, second, third = (
        ledger.reserve((number, "both"), 0, 500, 500, True, 0.0) for number in range(3)
    )
    ledger.advance(3600.0)
    assert queued(columns) == 1000.0
    ledger.first_token(second, 3600.0)  # one overtook: what stood before it counts as done
    assert queued(columns) == 500.0
    ledger.advance(7200.0)
    assert queued(columns) == 500.0
    ledger.release(first)
    ledger.advance(7200.0 + 250.0 / RATE)
    assert queued(columns) == 250.0
    ledger.first_token(third, 7300.0)
    assert queued(columns) == 0.0


def test_a_prompt_without_a_stream_drains_by_the_model_alone() -> None:
    columns, ledger = columns_of_one_worker()
    for number, stream in enumerate((False, True, False)):
        ledger.reserve((number, "both"), 0, 500, 500, stream, 0.0)
    ledger.advance(3600.0)
    assert queued(columns) == 500.0


@patient
@given(
    tokens=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    waits=st.lists(st.floats(0.0, 3.0), min_size=8, max_size=8),
    order=st.permutations(range(8)),
)
def test_the_table_is_empty_after_all_requests_end_in_any_order(tokens, waits, order) -> None:
    columns, ledger = columns_of_one_worker()
    now_s, charges = 0.0, dict[int, Charge]()
    for number, (count, wait_s) in enumerate(zip(tokens, waits, strict=False)):
        now_s += wait_s
        ledger.advance(now_s)
        key = number, "both"
        charges[number] = ledger.reserve(key, 0, count, count, number % 2 == 0, now_s)
    for number in order:
        if number in charges:
            ledger.release(charges[number])
        assert -1e-9 <= queued(columns) <= sum(tokens)
        assert ledger.get(number) is None
    assert (columns.requests[0], columns.waiting[0]) == (0, 0)
    assert queued(columns) == columns.context_tokens[0] == 0.0


@patient
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(1, 50_000), st.floats(0.0, 1.0)),
            st.tuples(st.just("attend"), st.just(0), st.floats(0.0, 1e-3)),
            st.tuples(st.sampled_from(("first token", "end")), st.integers(0, 7), st.just(0.0)),
        ),
        max_size=40,
    )
)
def test_the_work_of_a_queued_token_is_the_mean_of_the_waiting_requests(steps: list) -> None:
    columns, ledger = columns_of_one_worker()
    for number, (kind, value, share) in enumerate(steps):
        charges = ledger.on_worker(0)
        if kind == "arrive":
            ledger.reserve((number, "both"), 0, value, max(int(value * share), 1), True, 0.0)
        elif kind == "attend":
            columns.attention.pair_tokens = share
        elif charges and kind == "end":
            ledger.release(charges[value % len(charges)])
        elif charges:
            ledger.first_token(charges[value % len(charges)], 0.0)
        waiting = [c for c in ledger.on_worker(0) if c.waiting]
        tokens = sum(c.uncached_tokens for c in waiting)
        mean = sum(c.work_tokens for c in waiting) / tokens if waiting else 1.0
        assert columns.token_work[0] == pytest.approx(mean, rel=1e-9)


def test_each_row_drains_at_its_own_rate_down_to_0() -> None:
    columns, ledger = columns_of_one_worker(3)
    columns.prefill_tokens_per_s[:] = [100.0, 200.0, 400.0]
    for slot in range(3):
        ledger.reserve((slot, "both"), slot, 300, 300, True, 0.0)
    ledger.advance(1.0)
    assert [queued(columns, slot) for slot in range(3)] == [200.0, 100.0, 0.0]


def test_a_clock_that_goes_back_drains_nothing_twice() -> None:
    columns, ledger = columns_of_one_worker()
    ledger.reserve((1, "both"), 0, 1000, 1000, True, 0.0)
    for now_s in (4.0, 1.0, 3.0, 4.0):
        ledger.advance(now_s)
        assert queued(columns) == 600.0
    ledger.advance(5.0)
    assert queued(columns) == 500.0


def test_a_row_is_reset_for_the_next_worker() -> None:
    columns, ledger = columns_of_one_worker()
    ledger.reserve((1, "both"), 0, 1000, 1000, True, 0.0)
    for name, column in columns.named():
        column[0] = True if column.dtype == np.bool_ else 7
        assert column[0], name
    columns.open(0, 5)
    fresh = WorkerColumns(1)
    fresh.worker_id[0] = 5
    for name, column in columns.named():
        np.testing.assert_array_equal(column, getattr(fresh, name), err_msg=name)


def test_foreign_load_counts_while_its_report_is_fresh() -> None:
    world = World(workers=1, signal_stale_s=5.0)
    world.core.on_arrival(world.arrival([1, 2]))
    world.core.on_load_report(LoadReport(0.0, 0, running=3, waiting=2, kv_used_tokens=640.0))

    def seen(now_s: float) -> tuple[int, int, float]:
        rows = Rows.of(world.core.workers)
        hits = np.zeros(1, dtype=np.int64)
        others_s = world.core.caches.others_s
        fleet = LiveFleet(world.core.columns, rows, hits, now_s, others_s, 5.0, world.core.arrivals)
        return int(fleet.running[0]), int(fleet.waiting[0]), float(fleet.load_age_s[0])

    assert seen(1.0) == (3, 2, 1.0)  # of five there, one waits here and is ours
    assert seen(6.0) == (0, 1, 6.0)


def test_a_report_of_fewer_requests_than_own_means_no_foreign_load() -> None:
    world = World(workers=1)
    for n in range(3):
        world.core.on_arrival(world.arrival([n]))
    world.core.on_load_report(LoadReport(0.0, 0, running=0, waiting=1, kv_used_tokens=0.0))
    assert world.core.columns.foreign_running[0] == world.core.columns.foreign_waiting[0] == 0


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("pair_tokens", [0.0, 1e-4])
def test_a_live_fleet_computes_the_same_load_tokens_as_a_plain_view(
    others: int, pair_tokens: float
) -> None:
    world = World(workers=5, signal_stale_s=5.0)
    core = world.core
    core.columns.attention.pair_tokens = pair_tokens
    core.columns.step_s[:5] = [0.01, 0.02, 0.013, 0.04, 0.03]
    for n in range(12):
        core.on_arrival(world.arrival(list(range(n))))
    core.on_load_report(LoadReport(0.0, 0, running=others, waiting=9, kv_used_tokens=0.0))
    for workers in (list(core.workers), [w for w in core.workers if w.slot in (0, 2, 3)]):
        rows = Rows.of(workers)
        hits = np.zeros(len(rows), dtype=np.int64)
        seen = (core.caches.others_s, 5.0, core.arrivals)
        fleet = LiveFleet(core.columns, rows, hits, 1.0, *seen)
        step = FleetView.step_tokens.fget(fleet)
        assert fleet.step_tokens == step > 0.0
        ordinary = FleetView.load_tokens(fleet, step).tolist()
        assert fleet.load_tokens(step).tolist() == ordinary
        assert any(ordinary)

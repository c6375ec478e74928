"""Tests of the reasons why a request waits, the estimate of how long, and the records of steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.scheduler.explain import admission_steps, dominant, explain, waiting
from engine.scheduler.request import MAX_REASONS, Reason, Request, State
from engine.scheduler.scheduler import Scheduler, SchedulerSettings
from engine.scheduler.types import StepSplit
from engine.server.metrics import StepRecords


def scheduler_of(blocks: int = 1000, **limits: int) -> Scheduler:
    return Scheduler(SchedulerSettings(**limits), BlockPool(blocks, 16))


def request_of(number: int, prompt_tokens: int, output_tokens: int) -> Request:
    prompt = np.full(prompt_tokens, number + 1, dtype=np.int32)
    return Request(number, prompt, output_tokens)


def step_on(scheduler: Scheduler, now_s: float, records: StepRecords | None = None) -> None:
    step = scheduler.schedule(now_s)
    assert step is not None
    scheduler.complete(step, {one.request_id: 7 for one in step.sampled}, now_s)
    if records is not None:
        records.note(step, StepSplit(0.001, 0.002, 0.003), 0.004, now_s)


def test_a_waiting_request_has_a_queue_position_a_reason_and_an_estimate() -> None:
    scheduler = scheduler_of(max_batch_size=1, max_num_tokens=64)
    for number in range(3):
        scheduler.add(request_of(number, 20, 10), float(number))
    step_on(scheduler, 5.0)
    said = explain(scheduler, scheduler.requests[2], 0.5, 7.0)
    assert (said.state, said.queue_position, said.reason) == ("waiting", 1, "max_batch_size")
    assert [(wait.reason, wait.wait_s) for wait in said.waits] == [("max_batch_size", 2.0)]
    # The first has 9 tokens to go, the second takes 10 steps after it.
    assert (said.admission_steps, said.admission_s) == (20, 10.0)
    assert said.age_s == 5.0
    first = explain(scheduler, scheduler.requests[0], 0.5, 7.0)
    assert (first.state, first.queue_position, first.admission_steps) == ("running", None, None)
    assert [wait.reason for wait in first.waits] == ["running"]
    assert dominant(scheduler) is Reason.MAX_BATCH_SIZE


def test_a_request_without_room_waits_for_kv_blocks() -> None:
    scheduler = scheduler_of(blocks=4, max_num_tokens=64, max_batch_size=8)
    scheduler.add(request_of(0, 40, 5), 0.0)
    scheduler.add(request_of(1, 40, 5), 0.0)
    scheduler.add(request_of(2, 4, 5), 0.0)
    step_on(scheduler, 1.0)
    second, third = waiting(scheduler)
    assert (second.reason, third.reason) == (Reason.KV_BLOCKS, Reason.PRIORITY)
    assert admission_steps(scheduler, [second]) == 5


def compare(scheduler: Scheduler, outputs: list[int], steps: int) -> None:
    """Assert that the estimate after `steps` steps equals the step at which each request was
    admitted.
    """
    for number, output_tokens in enumerate(outputs):
        scheduler.add(request_of(number, 20, output_tokens), 0.0)
    for _ in range(steps):
        if scheduler.requests:
            step_on(scheduler, 0.0)
    queue = waiting(scheduler)
    said = {one: admission_steps(scheduler, queue[: place + 1]) for place, one in enumerate(queue)}
    took: dict[Request, int] = {}
    number = 0
    while len(took) < len(queue):
        number += 1
        step_on(scheduler, 0.0)
        for one in queue:
            if one.state is not State.WAITING:
                took.setdefault(one, number)
    assert said == took


@given(
    outputs=st.lists(st.integers(1, 9), min_size=2, max_size=12),
    places=st.integers(1, 4),
    steps=st.integers(1, 5),
)
def test_the_estimate_is_exact_if_no_request_stops_early(
    outputs: list[int], places: int, steps: int
) -> None:
    compare(scheduler_of(max_batch_size=places, max_num_tokens=4096), outputs, steps)


@given(
    outputs=st.lists(st.integers(1, 90), min_size=2, max_size=12),
    blocks=st.integers(9, 30),
    steps=st.integers(1, 40),
    share=st.sampled_from([0.0, 0.2]),
)
def test_the_estimate_counts_reserved_blocks(
    outputs: list[int], blocks: int, steps: int, share: float
) -> None:
    settings = SchedulerSettings(
        batch_scheduler_policy="guaranteed_no_evict", max_num_tokens=4096, pinned_share=share
    )
    compare(Scheduler(settings, BlockPool(blocks, 16)), outputs, steps)


def test_only_the_latest_reasons_are_kept() -> None:
    request = request_of(0, 4, 4)
    for number in range(3 * MAX_REASONS):
        request.note(Reason.PRIORITY if number % 2 else None, float(number))
    assert len(request.reasons) == MAX_REASONS
    assert request.reasons[-1] == (Reason.PRIORITY, 3 * MAX_REASONS - 1)


def test_step_records_show_computed_tokens_and_waiting_requests() -> None:
    scheduler = scheduler_of(max_batch_size=2, max_num_tokens=64)
    records = StepRecords(scheduler, kept=3)
    for number in range(4):
        scheduler.add(request_of(number, 20, 10), 0.0)
    for now_s in range(5):
        step_on(scheduler, float(now_s), records)
    kept = records.last(10)
    assert [one.number for one in kept] == [2, 3, 4]
    last = kept[-1]
    assert (last.batch_size, last.decode_tokens, last.prefill_tokens) == (2, 2, 0)
    assert last.budget_used == 2 / 64
    assert (last.schedule_ms, last.compute_ms, last.complete_ms, last.answer_ms) == (1, 2, 3, 4)
    assert last.waiting_by_reason == {"max_batch_size": 2}
    assert (last.running, last.waiting) == (2, 2)
    assert records.last(1) == [last]
    assert records.last(0) == []


def test_step_records_show_preemptions_and_later_recomputed_tokens() -> None:
    scheduler = scheduler_of(blocks=6, max_batch_size=2, max_num_tokens=64)
    records = StepRecords(scheduler)
    scheduler.add(request_of(0, 30, 30), 0.0)
    scheduler.add(request_of(1, 30, 30), 0.1)
    while scheduler.requests:
        step_on(scheduler, 1.0, records)
    kept = records.last(1000)
    assert sum(one.preemptions for one in kept) == scheduler.preemptions_total > 0
    recomputed_tokens = sum(one.recomputed_tokens for one in kept)
    assert recomputed_tokens == scheduler.recomputed_tokens_total > 0

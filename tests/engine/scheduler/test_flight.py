"""Tests of several steps in flight: the next step is made before the tokens of the one before it
are known.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings

from engine.block_pool import BlockPool
from engine.scheduler.scheduler import Request, Scheduler, SchedulerSettings
from tests.effort import examples
from tests.engine.scheduler.flying import FlyingDriver
from tests.engine.scheduler.machines import BLOCKS, PolicyMachine, SchedulerMachine
from tests.engine.scheduling import SIZE, Driver, alone, make, next_token, request


def in_flight(
    steps: int = 2, *, ahead: bool = True, blocks: int = 64, **limits: float
) -> Scheduler:
    limits = {"max_num_tokens": 64, "max_batch_size": 16, "max_model_tokens": 4096} | limits
    return Scheduler(
        SchedulerSettings(**limits),  # type: ignore[arg-type]
        BlockPool(blocks, SIZE),
        steps_in_flight=steps,
        runs_ahead=ahead,
    )


class AheadMachine(SchedulerMachine):
    """Checks the promises of a scheduler with two steps in flight, and that no block is given away
    too early.
    """

    flight: ClassVar[dict[str, Any]] = {"steps": 2, "ahead": True}

    def driven(self) -> Driver:
        return FlyingDriver(in_flight(blocks=BLOCKS, **self.flight, **self.limits))

    def leaving(self) -> list[Request]:
        return self.scheduler._leaving


class AheadPolicyMachine(AheadMachine, PolicyMachine):
    """Checks the same with every policy switched on; room that is reserved for a request is
    released when the request leaves.
    """


class StagesMachine(AheadMachine):
    """Checks the promises with three steps in flight whose requests share only prompts."""

    flight: ClassVar[dict[str, Any]] = {"steps": 3, "ahead": False}


TestAheadMachine = AheadMachine.TestCase
TestAheadPolicyMachine = AheadPolicyMachine.TestCase
TestStagesMachine = StagesMachine.TestCase
for _case in (TestAheadMachine, TestAheadPolicyMachine, TestStagesMachine):
    _case.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("steps", "ahead"), [(2, True), (2, False), (3, False)])
def test_answers_equal_those_of_one_step_at_a_time(steps: int, ahead: bool) -> None:
    """Answers equal those of one step at a time, in a cache too small for all requests, with
    preemptions, hits and evictions.
    """
    driver = FlyingDriver(in_flight(steps, ahead=ahead, blocks=20, watermark=0.0))
    prompts = {n: [n % 3] * 8 + [n] for n in range(12)}
    for number, prompt in prompts.items():
        driver.scheduler.add(request(number, prompt, 20), 0.0)
    driver.run()
    assert driver.outputs == {n: alone(prompt, 20) for n, prompt in prompts.items()}
    assert driver.most_in_flight == steps
    assert driver.scheduler.preemptions_total
    assert driver.scheduler.kv_used_blocks == 0


def test_a_decode_is_scheduled_ahead_up_to_its_maximum_output() -> None:
    scheduler = in_flight()
    one = request(1, [1, 2, 3], 3)
    scheduler.add(one, 0.0)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert first is not None
    assert second is not None
    assert (first.prefill_tokens, second.decodes) == (3, [one])
    assert (one.computed_tokens, one.scheduled_tokens) == (0, 4)
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="step 1 is not the oldest"):
        scheduler.complete(second, {1: 9}, 0.0)
    assert scheduler.complete(first, {1: 9}, 0.1)[0].finished is None
    third = scheduler.schedule(0.1)
    assert third is not None
    assert scheduler.complete(second, {1: 8}, 0.2)[0].finished is None
    # Its third and last token is in flight.
    assert scheduler.schedule(0.2) is None
    assert scheduler.complete(third, {1: 7}, 0.3)[0].finished == "length"
    assert one.output == [9, 8, 7]
    assert scheduler.kv_used_blocks == 0


def test_tokens_after_a_stop_are_dropped_and_blocks_freed_after_their_step() -> None:
    scheduler = in_flight()
    one = request(1, [1, 2, 3], 9, stop_tokens=frozenset({9}))
    scheduler.add(one, 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None
    assert second is not None
    assert scheduler.complete(first, {1: 9}, 0.1)[0].finished == "stop"
    assert not scheduler.requests
    assert scheduler.kv_used_blocks == 1, "the second step still writes it"
    assert scheduler.schedule(0.1) is None
    assert scheduler.complete(second, {1: 5}, 0.2) == []
    assert (one.output, scheduler.kv_used_blocks) == ([9], 0)
    # Its fourth token was computed after the request had ended, so its block is not shown.
    assert scheduler.pool.cached_blocks == 0


def test_with_stages_requests_wait_for_their_token_and_are_split_over_steps() -> None:
    scheduler = in_flight(2, ahead=False)
    ones = [request(number, [number], 9) for number in range(5)]
    for one in ones:
        scheduler.add(one, 0.0)
    prefill = scheduler.schedule(0.0)
    assert prefill is not None
    assert scheduler.schedule(0.0) is None
    assert scheduler.not_scheduled_total == dict.fromkeys(scheduler.not_scheduled_total, 0)
    scheduler.complete(prefill, {one.request_id: next_token(one) for one in ones}, 0.1)
    first, second = scheduler.schedule(0.1), scheduler.schedule(0.1)
    assert first is not None
    assert second is not None
    assert (first.decodes, second.decodes) == (ones[:3], ones[3:])
    scheduler.complete(first, {one.request_id: next_token(one) for one in first.decodes}, 0.2)
    third = scheduler.schedule(0.2)
    assert third is not None
    assert third.decodes == ones[:3]


def test_a_request_in_a_step_in_flight_is_not_preempted() -> None:
    driver = FlyingDriver(in_flight(blocks=3, watermark=0.0))
    for number in range(2):
        driver.scheduler.add(request(number, [number] * 3, 7), 0.0)
    while not driver.scheduler.preemptions_total:
        driver.step()
        if driver.steps[-1].preempted:
            assert len(driver.flown) == 1, "it is the only one in flight"
    driver.run()
    assert driver.outputs == {number: alone([number] * 3, 7) for number in range(2)}


def test_a_number_of_steps_out_of_range_is_refused() -> None:
    for steps in (0, 17):
        with pytest.raises(ValueError, match=r"1\.\.16"):
            in_flight(steps)


def test_with_one_step_at_a_time_a_cancel_frees_blocks_at_once() -> None:
    scheduler = make()
    scheduler.add(request(1, [1, 2, 3], 3), 0.0)
    scheduler.schedule(0.0)
    scheduler.cancel(1)
    assert scheduler.kv_used_blocks == 0

"""Tests of requests that are interrupted: preempted, cancelled, or caught by a cleared cache."""

from __future__ import annotations

import pytest

from engine.scheduler.scheduler import Reason, State
from tests.engine.scheduling import Driver, alone, make, request
from tests.oracles.block_pool import check_pool


def test_preemption_recomputes_and_changes_no_answer():
    prompts = {i: [i * 7 % 50 for _ in range(10 + i)] for i in range(4)}
    driver = Driver(make(blocks=14, watermark=0.0))
    for request_id, prompt in prompts.items():
        driver.scheduler.add(request(request_id, prompt, 20), 0.0)
    requests = dict(driver.scheduler.requests)
    driver.run()
    assert driver.scheduler.preemptions_total > 0
    assert sum(one.preemptions for one in requests.values()) == driver.scheduler.preemptions_total
    assert driver.scheduler.recomputed_tokens_total > 0
    assert requests[0].preemptions == 0, "the first in order is never a victim"
    for request_id, prompt in prompts.items():
        assert driver.outputs[request_id] == alone(prompt, 20)
    check_pool(driver.scheduler.pool)


def test_the_last_request_in_order_is_preempted_and_requeued_at_the_front():
    scheduler = make(blocks=6, watermark=0.0)
    driver = Driver(scheduler)
    scheduler.add(request(1, range(8), 30, priority=1), 0.0)
    scheduler.add(request(2, range(100, 108), 9), 0.0)
    while not scheduler.preemptions_total:
        driver.step()
    (victim,) = driver.steps[-1].preempted
    assert victim.request_id == 1
    assert victim.output
    scheduler.add(request(3, [9], 9, priority=-5), driver.now_s)
    driver.step()
    assert victim.reason is Reason.KV_BLOCKS
    assert scheduler.requests[3].reason is Reason.PRIORITY
    driver.run()
    assert len(driver.outputs[1]) == 16, "8 + 16 tokens are the whole cache"


def test_a_preempted_request_hits_its_published_blocks():
    scheduler = make(blocks=12, watermark=0.0)
    driver = Driver(scheduler)
    scheduler.add(request(1, range(16), 12), 0.0)
    scheduler.add(request(2, range(100, 116), 12), 0.0)
    while not scheduler.preemptions_total:
        driver.step()
    (victim,) = driver.steps[-1].preempted
    driver.run()
    assert victim.cached_tokens == 0, "the first admission's figure stays"
    assert scheduler.recomputed_tokens_total < victim.total_tokens


def test_a_cancel_at_every_stage_frees_all_blocks():
    for steps in range(6):
        scheduler = make(max_num_tokens=16)
        driver = Driver(scheduler)
        scheduler.add(request(1, range(30), 9), 0.0)
        for _ in range(steps):
            driver.step()
        assert scheduler.cancel(1)
        assert not scheduler.cancel(1)
        assert (scheduler.running, scheduler.waiting, scheduler.kv_used_blocks) == (0, 0, 0)
        assert scheduler.schedule(driver.now_s) is None
        check_pool(scheduler.pool)


def test_a_request_can_be_cancelled_while_its_step_is_in_flight():
    scheduler = make()
    scheduler.add(request(1, range(9), 9), 0.0)
    scheduler.add(request(2, range(50, 59), 1), 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    assert scheduler.cancel(1)
    scheduler.add(request(1, range(20), 1), 0.0)  # its id is free again at once
    outputs = scheduler.complete(step, {2: 5}, 0.1)
    assert [(o.request.request_id, o.token, o.finished) for o in outputs] == [(2, 5, "length")]
    assert scheduler.requests[1].state is State.WAITING
    check_pool(scheduler.pool)


def test_one_step_is_in_flight_at_a_time():
    scheduler = make()
    scheduler.add(request(1, range(9), 2), 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    with pytest.raises(RuntimeError, match="completed first"):
        scheduler.schedule(0.0)
    scheduler.complete(step, {1: 5}, 0.1)
    with pytest.raises(ValueError, match="in flight"):
        scheduler.complete(step, {1: 5}, 0.1)


def test_blocks_computed_before_a_clear_are_never_published():
    scheduler = make(max_num_tokens=16)
    driver = Driver(scheduler)
    scheduler.add(request(1, range(40), 20), 0.0)
    driver.step()
    scheduler.pool.clear()
    scheduler.pool.drain_events()
    driver.run()
    assert scheduler.pool.drain_events() == []
    assert scheduler.pool.cached_blocks == 0
    assert driver.outputs[1] == alone(list(range(40)), 20)
    check_pool(scheduler.pool)

"""Tests of the policies that an operator may choose: no eviction, a delay to fill a batch, short
requests first, deadlines, shares of tenants, a pace of decodes.
"""

from __future__ import annotations

from math import inf

import pytest

from engine.scheduler.scheduler import SLACK, Deadlines, Pace, Reason, SchedulerSettings, State
from tests.engine.scheduling import SIZE, Driver, make, request

NO_EVICT = {"batch_scheduler_policy": "guaranteed_no_evict"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("batch_scheduler_policy", "no_evict"),
        ("max_queue_delay_microseconds", -1),
        ("max_queue_delay_microseconds", 10_000_001),
        ("length_ageing_s", -0.1),
        ("tpot_target_ms", float("nan")),
        ("tenant_share", 0.0),
        ("tenant_share", 1.1),
    ],
)
def test_the_error_names_the_setting_out_of_range(setting, value):
    with pytest.raises(ValueError, match=setting):
        SchedulerSettings(**{setting: value})


def test_no_evict_admits_only_with_room_for_the_full_output():
    """Without eviction, a request is admitted only if its whole output has room: of two prompts of
    2 blocks, whose outputs need 6 more each, only one runs in 12 blocks.
    """
    prompts = [range(8), range(100, 108)]
    for policy, beside in ((NO_EVICT, 1), ({}, 2)):
        driver = Driver(make(blocks=12, watermark=0.0, **policy))
        for request_id, prompt in enumerate(prompts):
            driver.scheduler.add(request(request_id, prompt, 25), 0.0)
        driver.step()
        assert driver.scheduler.running == beside
        waiting = [one for one in driver.scheduler.requests.values() if one.reason]
        assert [one.reason for one in waiting] == [Reason.RESERVE_POLICY] * (2 - beside)
        driver.run()
        assert bool(driver.scheduler.preemptions_total) == (beside == 2)
        assert [len(driver.outputs[one]) for one in (0, 1)] == [25, 25]


def test_reserving_blocks_does_not_evict_cached_blocks_before_use():
    driver = Driver(make(blocks=16, **NO_EVICT))
    driver.scheduler.add(request(0, range(5 * SIZE), 1), 0.0)
    driver.run()
    cached = driver.scheduler.pool.cached_blocks
    driver.scheduler.add(request(1, range(100, 108), 50), 0.0)
    driver.step()
    assert driver.scheduler.pool.cached_blocks >= cached
    assert driver.scheduler.kv_used_blocks == 2
    driver.run()
    assert driver.scheduler._blocks.reserved_blocks == 0


def test_the_last_token_needs_no_block():
    """The last output token needs no room: a prompt of 8 tokens with 9 output tokens keeps the KV
    of 16 tokens, for which 4 blocks are enough.
    """
    driver = Driver(make(blocks=8, **NO_EVICT))
    for request_id in range(2):
        driver.scheduler.add(request(request_id, [request_id] * 8, 9), 0.0)
    driver.step()
    assert driver.scheduler.running == 2
    driver.run()
    assert driver.scheduler.preemptions_total == 0


def test_an_idle_engine_waits_to_fill_its_first_batch():
    scheduler = make(max_queue_delay_microseconds=5000)
    scheduler.add(request(1, range(4)), 1.0)
    assert scheduler.schedule(1.001) is None
    assert scheduler.wake_s == 1.005
    assert scheduler.requests[1].reason is Reason.QUEUE_DELAY
    scheduler.add(request(2, range(4)), 1.004)
    assert scheduler.schedule(1.0049) is None, "the second one does not begin the wait anew"
    step = scheduler.schedule(1.005)
    assert step is not None
    assert len(step.chunks) == 2
    assert scheduler.wake_s is None
    scheduler.complete(step, {1: 1, 2: 2}, 1.01)
    scheduler.add(request(3, range(50, 54)), 1.01)
    step = scheduler.schedule(1.01)
    assert step is not None
    assert [chunk.request.request_id for chunk in step.chunks] == [3], "only idle engines wait"


@pytest.mark.parametrize("limits", [{"max_batch_size": 2}, {"max_num_tokens": 16}])
def test_a_full_batch_does_not_wait(limits):
    scheduler = make(max_queue_delay_microseconds=5000, **limits)
    scheduler.add(request(1, range(8)), 0.0)
    assert scheduler.schedule(0.0) is None
    scheduler.add(request(2, range(50, 58)), 0.0)
    assert scheduler.schedule(0.0) is not None


def test_a_cancelled_wait_leaves_no_wake_time():
    scheduler = make(max_queue_delay_microseconds=5000)
    scheduler.add(request(1, range(8)), 0.0)
    assert scheduler.schedule(0.0) is None
    scheduler.cancel(1)
    assert scheduler.schedule(0.001) is None
    assert scheduler.wake_s is None


def test_short_prompts_run_first_and_long_prompts_do_not_starve():
    scheduler = make(blocks=200, max_batch_size=1, length_ageing_s=10.0)
    scheduler.add(request(1, range(500)), 0.0)
    scheduler.add(request(2, range(10)), 4.0)
    scheduler.add(request(3, range(10)), 6.0)
    order = sorted(scheduler.requests.values(), key=lambda one: one.queue_key)
    assert [one.request_id for one in order] == [2, 1, 3]


def test_a_deadline_ends_waiting_and_running_requests():
    scheduler = make(max_batch_size=1)
    driver = Driver(scheduler)
    running, waiting = request(1, range(8), 99, deadline_s=5.0), request(2, [1], deadline_s=4.0)
    later, ever = request(3, [2], deadline_s=6.0), request(4, [3])
    for one in (running, waiting, later, ever):
        scheduler.add(one, 0.0)
    driver.step()
    assert scheduler.wake_s == 4.0
    assert scheduler.expire(3.9) == []
    assert scheduler.expire(4.0) == [waiting]
    step = scheduler.schedule(4.5)
    assert step is not None
    assert scheduler.expire(5.5) == [running], "a step in flight changes nothing"
    assert [one.finish_reason for one in (running, waiting)] == ["timeout"] * 2
    assert scheduler.complete(step, {1: 7}, 5.6) == []
    assert scheduler.expire(5.6) == []
    driver.now_s = 5.6
    driver.run()
    assert set(driver.finished) == {3, 4}
    assert scheduler.wake_s is None
    assert scheduler.kv_used_blocks == 0


def test_deadlines_of_finished_requests_do_not_pile_up():
    deadlines = Deadlines()
    for number in range(1000):
        one = request(number, [1], deadline_s=1e9)
        deadlines.add(one, 1)
        one.state = State.FINISHED
        assert len(deadlines._heap) <= SLACK + 3
    assert deadlines.next_s() is None
    deadlines.add(request(0, [1], deadline_s=inf), 1)
    assert deadlines.next_s() is None


def test_a_runner_may_end_a_request_with_the_step():
    scheduler = make()
    for request_id in range(3):
        scheduler.add(request(request_id, [request_id], 9), 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    ended = {0: "stop", 1: "error"}
    outputs = scheduler.complete(step, {0: 1, 1: 1, 2: 1}, 0.1, ended)
    assert [output.finished for output in outputs] == ["stop", "error", None]
    assert list(scheduler.requests) == [2]


def test_running_requests_of_a_tenant_do_not_exceed_its_share():
    scheduler = make(blocks=16, watermark=0.0, tenant_share=0.5)
    driver = Driver(scheduler)
    for request_id in range(4):  # 3 blocks each
        scheduler.add(request(request_id, [request_id] * 12, 3, tenant="a"), 0.0)
    scheduler.add(request(4, [9] * 12, 3, tenant="b"), 0.0)
    driver.step()
    reasons = [scheduler.requests[one].reason for one in range(5)]
    assert reasons == [None, None, Reason.TENANT_SHARE, Reason.TENANT_SHARE, None]
    driver.run()
    assert len(driver.finished) == 5
    assert scheduler._blocks._held_by == {}


def test_a_tenants_only_request_may_exceed_its_share():
    driver = Driver(make(blocks=16, tenant_share=0.1))
    driver.scheduler.add(request(0, range(40), 3, tenant="a"), 0.0)
    driver.run()
    assert driver.finished == {0: "length"}


def test_shared_trunk_blocks_count_once_against_the_share():
    """Shared blocks count only once: three requests with two shared cached blocks and one own block
    each run within a limit.
    """
    driver = Driver(make(blocks=16, watermark=0.0, tenant_share=0.25))
    driver.scheduler.add(request(0, range(8), 1, tenant="a"), 0.0)
    driver.run()
    for request_id in range(1, 4):
        driver.scheduler.add(request(request_id, [*range(8), request_id], 2, tenant="a"), 1.0)
    driver.step()
    assert driver.scheduler.running == 3


@pytest.mark.parametrize("target_ms", [12.0, 20.0, 50.0])
def test_decodes_keep_their_time_per_token_beside_prompts(target_ms):
    """Decodes keep their time per token next to prompts, with steps of 5 ms and 50 us for each
    prompt token: steps settle just below the limit.
    """
    pace = Pace(target_ms / 1e3, least_tokens=16, most_tokens=8192)
    times = []
    for _ in range(400):
        times.append(0.005 + 5e-5 * pace.prefill_tokens)
        pace.observe(pace.prefill_tokens, times[-1])
    settled = times[200:]
    assert sum(settled) / len(settled) <= target_ms / 1e3 + 1e-9
    assert min(settled) >= 0.5 * target_ms / 1e3
    assert pace.prefill_tokens > 16


def test_prompts_continue_if_decodes_alone_miss_the_target():
    pace = Pace(0.001, least_tokens=16, most_tokens=8192)
    for _ in range(50):
        pace.observe(pace.prefill_tokens, 0.02)
    assert pace.prefill_tokens == 16
    pace.observe(0, 10.0)
    assert pace.prefill_tokens == 16


def test_the_scheduler_measures_its_own_steps():
    scheduler = make(blocks=1000, tpot_target_ms=15.0, max_num_tokens=512)
    driver = Driver(scheduler, step_s=lambda step: 0.005 + 1e-4 * step.prefill_tokens)
    scheduler.add(request(0, range(8), 400), 0.0)
    driver.step()
    for request_id in range(1, 6):
        scheduler.add(request(request_id, [request_id] * 600, 2), 0.0)
    driver.run()
    beside = [one.prefill_tokens for one in driver.steps if one.decodes and one.prefill_tokens]
    assert beside[0] > 400
    assert max(beside[4:]) <= 110
    assert all(steps.prefill_tokens <= 512 for steps in driver.steps)

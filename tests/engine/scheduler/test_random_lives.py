"""Tests of random histories of a scheduler: arrivals with shared prefixes, cancels, clears, and a
tiny KV cache.
"""

from __future__ import annotations

from hypothesis import settings

from engine.scheduler.scheduler import Reason, SchedulerSettings
from tests.effort import examples
from tests.engine.scheduler.machines import (
    BLOCKS,
    LIMITS,
    PolicyMachine,
    SchedulerMachine,
)
from tests.engine.scheduling import Driver, make, request

ONLY_BY_POLICY = {
    *(Reason.RESERVE_POLICY, Reason.TENANT_SHARE, Reason.QUEUE_DELAY, Reason.KV_TRANSFER),
}


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)


def test_the_limits_cause_all_kinds_of_waiting():
    """The limits in the random histories cause all kinds of waiting; without that the histories
    would test little.
    """
    assert SchedulerSettings(**LIMITS).max_batch_size < BLOCKS  # type: ignore[arg-type]
    driver = Driver(make(blocks=BLOCKS, **LIMITS))
    for request_id in range(40):
        prompt = [request_id // 8] * 12 + [request_id]
        driver.scheduler.add(request(request_id, prompt, 25), 0.0)
    for request_id in range(40, 48):
        driver.scheduler.add(request(request_id, [request_id], 25), 0.0)
    driver.run()
    waits = driver.scheduler.not_scheduled_total
    assert {reason for reason, count in waits.items() if not count} == ONLY_BY_POLICY
    assert driver.scheduler.preemptions_total
    assert driver.scheduler.pool.evicted_total

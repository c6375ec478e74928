"""Random histories of a scheduler, as hypothesis state machines."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import Removed, Stored
from engine.scheduler.scheduler import Reason, Request, State, Step
from tests.engine.scheduling import SIZE, Driver, make, next_token, request
from tests.oracles.block_pool import check_pool

LIMITS = {
    "max_num_tokens": 24,
    "max_batch_size": 4,
    "max_model_tokens": 60,
    "min_chunk_tokens": 4,
    "watermark": 0.1,
    "ageing_s": 0.5,
    "prefix_wait_tokens": 8,
}
BLOCKS = 12


def continuation(prompt: list[int], count: int) -> list[int]:
    """Return the only right continuation of a prompt, in which each token follows from all tokens
    before it.
    """
    one = request(0, prompt, count)
    for _ in range(count):
        one.output.append(next_token(one))
    return one.output


class SchedulerMachine(RuleBasedStateMachine):
    """Checks that every request is answered once and rightly, that no block is lost, and that every
    wait has a reason.
    """

    limits: ClassVar[dict[str, Any]] = LIMITS
    deadlines_s: tuple[float, ...] = (inf,)  # after arrival

    def __init__(self) -> None:
        super().__init__()
        self.driver = self.driven()
        self.scheduler = self.driver.scheduler
        self.prompts: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}
        self.cancelled: set[int] = set()
        self.told: set[tuple[int, int]] = set()  # group, chain hash
        self.waits = dict.fromkeys(Reason, 0)

    def driven(self) -> Driver:
        return Driver(make(blocks=BLOCKS, **self.limits))

    def leaving(self) -> list[Request]:
        """Return the requests that have ended while a step in flight writes their blocks."""
        return []

    @rule(
        trunk=st.integers(0, 2),
        trunk_tokens=st.integers(0, 24),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        output_tokens=st.integers(1, 25),
        priority=st.integers(-1, 2),
        deadline=st.integers(0, 3),
        tenant=st.sampled_from("ab"),
    )
    def arrive(
        self,
        trunk: int,
        trunk_tokens: int,
        tail: list[int],
        output_tokens: int,
        priority: int,
        deadline: int,
        tenant: str,
    ) -> None:
        prompt = [trunk] * trunk_tokens + tail
        request_id = len(self.prompts)
        deadline_s = self.deadlines_s[deadline % len(self.deadlines_s)] + self.driver.now_s
        terms = {"priority": priority, "deadline_s": deadline_s, "tenant": tenant}
        one = request(request_id, prompt, output_tokens, **terms)
        self.scheduler.add(one, self.driver.now_s)
        self.prompts[request_id] = prompt
        self.requests[request_id] = one

    @precondition(lambda self: self.scheduler.requests)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()
            if self.driver.steps:
                self.check_step(self.driver.steps[-1])
                self.driver.steps.clear()

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        assert self.scheduler.cancel(request_id)
        self.cancelled.add(request_id)

    @rule()
    def clear(self) -> None:
        self.scheduler.pool.clear()

    def check_step(self, step: Step) -> None:
        """Check the scheduler's promises for one step."""
        tokens = step.prefill_tokens + step.decode_seqs
        assert 0 < tokens <= LIMITS["max_num_tokens"]
        assert step.prefill_tokens == sum(chunk.tokens for chunk in step.chunks)
        assert all(chunk.tokens > 0 for chunk in step.chunks)
        served = [one.request_id for one in step.decodes]
        served += [chunk.request.request_id for chunk in step.chunks]
        assert len(served) == len(set(served)) <= LIMITS["max_batch_size"]
        for victim in step.preempted:
            place = (1, *victim.queue_key[1:])
            assert all(one.queue_key < place for one in step.decodes)
        for one in self.scheduler.requests.values():
            if one.state in (State.WAITING, State.READING):
                assert one.reason is not None
                self.waits[one.reason] += 1
        assert self.waits == self.scheduler.not_scheduled_total

    @invariant()
    def blocks_and_requests_add_up(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        check_pool(pool)
        running = [one for one in scheduler.requests.values() if one.state is State.RUNNING]
        assert scheduler.running == len(running)
        assert scheduler.running + scheduler.waiting == len(scheduler.requests)
        holders = [*running, *self.leaving()]
        held = {block for one in holders for block in (*one.block_ids, *one.group_ids)}
        assert pool.used_blocks == scheduler.kv_used_blocks == len(held)
        for one in running:
            assert len(set(one.block_ids)) == len(one.block_ids)
            assert one.computed_tokens <= len(one.block_ids) * SIZE
        for event in pool.drain_events():
            if isinstance(event, Stored | Removed):
                told = {(event.group or 0, block_hash) for block_hash in event.block_hashes}
            if isinstance(event, Stored):
                assert not self.told & told
                self.told |= told
            elif isinstance(event, Removed):
                assert self.told >= told
                self.told -= told
            else:
                self.told.clear()
        assert len(self.told) == pool.cached_blocks + len(pool.groups or ())

    def teardown(self) -> None:
        """Assert that all remaining requests end, and that each has the only right answer."""
        self.driver.run(limit=5000)
        assert self.scheduler.kv_used_blocks == 0
        assert not self.scheduler._blocks._frontier
        assert not self.scheduler._blocks._ends_in_flight
        answered = set(self.driver.finished)
        assert answered | self.cancelled == set(self.prompts)
        assert not answered & self.cancelled
        for request_id, prompt in self.prompts.items():
            given = self.driver.outputs.get(request_id, [])
            assert given == continuation(prompt, len(given))
            if self.driver.finished.get(request_id) == "timeout":
                assert self.requests[request_id].finish_reason == "timeout"
            elif request_id in answered:
                room = self.scheduler.max_sequence_tokens - len(prompt)
                assert len(given) == min(self.requests[request_id].max_output_tokens, room)


class PolicyMachine(SchedulerMachine):
    """Checks the same promises with every policy switched on, and that no running request is ever
    evicted.
    """

    limits: ClassVar[dict[str, Any]] = LIMITS | {
        "batch_scheduler_policy": "guaranteed_no_evict",
        "max_queue_delay_microseconds": 15_000,
        "length_ageing_s": 20.0,
        "tpot_target_ms": 5.0,
        "tenant_share": 0.4,
    }
    deadlines_s = (inf, inf, 0.05, 0.4)

    @invariant()
    def no_request_is_evicted(self) -> None:
        blocks, pool = self.scheduler._blocks, self.scheduler.pool
        assert self.scheduler.preemptions_total == 0
        assert 0 <= blocks.reserved_blocks <= pool.available_blocks
        running = [one for one in self.requests.values() if one.state is State.RUNNING]
        running += self.leaving()
        for tenant in "ab":
            own = [one.own_blocks for one in running if one.tenant == tenant]
            assert blocks.held_by(tenant) == sum(own)

    def teardown(self) -> None:
        super().teardown()
        assert self.scheduler._blocks.reserved_blocks == 0

"""Tests of prompts whose KV comes from another worker, and of KV that is kept for another worker:
no block is lost.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.pins import EXTENSION, Export, Exports
from engine.scheduler.request import Reason, Request, State
from engine.scheduler.types import Output, Read, SchedulerSettings
from tests.effort import examples
from tests.engine.scheduler.machines import BLOCKS, LIMITS, SchedulerMachine
from tests.engine.scheduling import SIZE, Driver, array, make, request
from tests.oracles.block_pool import check_pool

PROMPT = list(range(4 * SIZE + 2))
LEASE_S = 30.0


class Reader(Driver):
    """A driver that ends the oldest KV transfer if nothing else could be done since it began."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.reads: deque[Read] = deque()
        self.begun: list[Read] = []

    def step(self) -> list[Output]:
        steps, begun = len(self.steps), list(self.reads)
        outputs = super().step()
        for read in self.scheduler.take_reads():
            self.begun.append(read)
            if read.start < read.stop:
                self.reads.append(read)
        if len(self.steps) == steps and begun:
            self.end(begun[0])
        return outputs

    def end(self, read: Read, *, arrived: bool = True) -> None:
        self.reads.remove(read)
        self.scheduler.end_read(read.request.request_id, self.now_s, arrived=arrived)


def reader(blocks: int = 64, **limits: float) -> Reader:
    return Reader(make(blocks=blocks, **limits))


def computed(driver: Driver, request_id: int = 0) -> int:
    """Return how many prompt tokens the steps computed for a request."""
    chunks = [chunk for step in driver.steps for chunk in step.chunks]
    return sum(chunk.tokens for chunk in chunks if chunk.request.request_id == request_id)


def prefill(driver: Driver, request_id: int, prompt: list[int]) -> Export:
    """Run the prefill of a prompt and return its exported KV."""
    one = request(request_id, prompt, 1, exports=True)
    driver.scheduler.add(one, driver.now_s)
    while one.request_id in driver.scheduler.requests:
        driver.step()
    assert one.export is not None
    return one.export


def test_only_the_last_token_of_an_imported_prompt_is_computed() -> None:
    driver = reader()
    one = request(0, PROMPT, 3, imports=True)
    driver.scheduler.add(one, 0.0)
    driver.step()
    assert (one.state, one.reason) == (State.READING, Reason.KV_TRANSFER)
    assert driver.scheduler.waiting == driver.scheduler.reading == 1
    assert driver.scheduler.kv_used_blocks == len(one.block_ids) == 5
    (read,) = driver.begun
    assert (read.start, read.stop) == (0, len(PROMPT) - 1)
    driver.run()
    assert computed(driver) == 1
    assert driver.scheduler.pool.hit(one.chain[:4]) == 4
    assert driver.scheduler.kv_used_blocks == 0


def test_only_uncached_blocks_are_transferred() -> None:
    driver = reader()
    for number, prompt in enumerate((PROMPT[: 2 * SIZE], PROMPT, [*PROMPT[: 4 * SIZE], 9])):
        driver.scheduler.add(request(number, prompt, 1, imports=number > 0), driver.now_s)
        driver.run()
    assert [(read.start, read.stop) for read in driver.begun] == [
        (2 * SIZE, len(PROMPT) - 1),
        (4 * SIZE, 4 * SIZE),
    ]
    assert computed(driver, 2) == 1


def test_blocks_that_did_not_arrive_are_computed() -> None:
    driver = reader()
    one = request(0, PROMPT, 3, imports=True)
    driver.scheduler.add(one, 0.0)
    driver.step()
    driver.end(driver.reads[0], arrived=False)
    assert driver.scheduler.kv_used_blocks == 0
    driver.run()
    assert computed(driver) == len(PROMPT)
    assert len(driver.begun) == 1
    assert driver.scheduler.prefix_query_tokens_total == len(PROMPT)


def test_blocks_of_a_transfer_stay_held_after_their_request_ends() -> None:
    driver = reader(blocks=8, max_model_tokens=32, watermark=0.0)
    driver.scheduler.add(request(0, PROMPT, 3, imports=True), 0.0)
    driver.step()
    assert driver.scheduler.cancel(0)
    assert driver.scheduler.kv_used_blocks == 5
    driver.scheduler.add(request(1, [7] * 20, 1), 0.0)
    driver.scheduler.schedule(0.0)
    assert driver.scheduler.requests[1].reason is Reason.KV_BLOCKS
    driver.end(driver.reads[0], arrived=True)
    driver.run()
    assert driver.scheduler.pool.hit(request(0, PROMPT).chain) == 0
    check_pool(driver.scheduler.pool)


def test_a_transfer_that_has_not_begun_ends_with_its_request() -> None:
    scheduler = make()
    scheduler.add(request(0, PROMPT, 3, imports=True), 0.0)
    assert scheduler.schedule(0.0) is None
    scheduler.cancel(0)
    assert (scheduler.take_reads(), scheduler.kv_used_blocks) == ([], 0)


def test_room_for_an_import_is_reserved_completely_or_not_at_all() -> None:
    driver = reader(blocks=8, max_model_tokens=32, watermark=0.0)
    for number in (0, 1):
        prompt = [number, *PROMPT]
        driver.scheduler.add(request(number, prompt, 3, imports=True), 0.0)
    driver.step()
    assert len(driver.begun) == 1
    assert driver.scheduler.requests[1].reason is Reason.KV_BLOCKS
    assert driver.scheduler.requests[1].block_ids == []
    driver.run()
    assert [computed(driver, number) for number in (0, 1)] == [1, 1]


def test_an_export_outlives_its_request_and_its_cache() -> None:
    driver = reader()
    export = prefill(driver, 0, PROMPT)
    assert export.prompt.tolist() == PROMPT
    assert len(export.block_ids) == driver.scheduler.kv_used_blocks == 5
    driver.scheduler.pool.clear()
    exports = driver.scheduler.exports
    assert exports.find(0, export.generation) is export
    assert exports.release(export)
    assert not exports.release(export)
    assert driver.scheduler.kv_used_blocks == 0
    check_pool(driver.scheduler.pool)


def test_an_expired_lease_is_visible_to_its_reader() -> None:
    driver = reader()
    exports = driver.scheduler.exports
    export, other = prefill(driver, 0, PROMPT), prefill(driver, 1, [*PROMPT, 5])
    exports.extend(other, driver.now_s + LEASE_S)
    assert other.until_s == driver.now_s + LEASE_S * (1 + EXTENSION)
    exports.advance(export.until_s)
    assert (exports.is_held(export), exports.is_held(other)) == (False, True)
    assert exports.expired_total == 1
    again = prefill(driver, 2, PROMPT)
    assert exports.find(2, export.generation) is None
    assert exports.find(2, again.generation) is again


def test_a_lease_end_wakes_a_request_that_waits_for_exported_blocks() -> None:
    driver = reader(blocks=8, max_model_tokens=32)
    export = prefill(driver, 0, PROMPT)
    driver.scheduler.add(request(1, [7] * 20, 1), driver.now_s)
    assert driver.scheduler.schedule(driver.now_s) is None
    assert driver.scheduler.wake_s == export.until_s
    driver.run()
    assert driver.now_s >= export.until_s


def test_exports_beyond_the_limit_are_refused() -> None:
    driver = reader(max_exports=1)
    first = prefill(driver, 0, PROMPT)
    one = request(1, PROMPT, 1, exports=True)
    driver.scheduler.add(one, driver.now_s)
    driver.run()
    assert one.export is None
    assert driver.scheduler.exports.refused_total == 1
    driver.scheduler.exports.release(first)
    assert driver.scheduler.kv_used_blocks == 0


def test_free_blocks_cannot_be_exported() -> None:
    driver = reader()
    exports = Exports(driver.scheduler.pool, LEASE_S, 1)
    export = exports.begin(0, array([1]), [3], 0)
    assert export is not None
    with pytest.raises(ValueError, match="held by nobody"):
        exports.keep(export, [3], 0.0)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), 1e9])
def test_leases_out_of_range_are_refused(lease_s: float) -> None:
    with pytest.raises(ValueError, match="export_lease_s"):
        SchedulerSettings(export_lease_s=lease_s)


def test_a_prompt_can_be_read_while_it_is_computed() -> None:
    driver = reader(max_num_tokens=8, max_batch_size=4, min_chunk_tokens=4)
    one = request(0, PROMPT, 1, exports=True, exports_early=True)
    driver.scheduler.add(one, 0.0)
    driver.step()
    export = one.export
    assert export is not None
    assert (export.ready_tokens, export.is_computing) == (8, True)
    driver.step()
    assert export.ready_tokens == 16
    assert export.block_ids[:4] == one.block_ids[:4]
    driver.run()
    assert (export.ready_tokens, export.is_computing) == (len(PROMPT), False)
    assert driver.scheduler.kv_used_blocks == 5
    assert driver.scheduler.exports.release(export)
    assert driver.scheduler.kv_used_blocks == 0


@pytest.mark.parametrize("end", ["cancel", "preempt", "release"])
def test_the_end_of_an_unfinished_prompt_is_visible_to_its_reader(end: str) -> None:
    driver = reader(max_num_tokens=8, max_batch_size=4, min_chunk_tokens=4)
    scheduler = driver.scheduler
    one = request(0, PROMPT, 1, exports=True, exports_early=True)
    scheduler.add(one, 0.0)
    driver.step()
    export = one.export
    assert export is not None
    if end == "cancel":
        scheduler.cancel(0)
    elif end == "preempt":
        scheduler._running.remove(one)
        scheduler._preempt(one)
    else:
        scheduler.exports.release(export)
    assert not scheduler.exports.is_held(export)
    driver.run()
    for left in [one.export] if one.export is not None and end == "preempt" else []:
        scheduler.exports.release(left)
    assert scheduler.kv_used_blocks == 0
    check_pool(scheduler.pool)


class TransferMachine(SchedulerMachine):
    """Checks the promises while reads of KV end late, fail, or outlive their requests, and exported
    KV is read, released, or abandoned.
    """

    def driven(self) -> Driver:
        self.reader = Reader(make(blocks=BLOCKS, export_lease_s=0.3, **LIMITS))
        return self.reader

    def leaving(self) -> list[Request]:
        reads = [read.request for read in self.reader.reads]
        held = [one for one in self.requests.values() if one.state is State.READING]
        return [*reads, *held]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        output_tokens=st.integers(1, 8),
        imports=st.booleans(),
        exports=st.booleans(),
        early=st.booleans(),
    )
    def arrive_with_kv(
        self, prompt: list[int], output_tokens: int, imports: bool, exports: bool, early: bool
    ) -> None:
        request_id = len(self.prompts)
        kv = {"imports": imports, "exports": exports, "exports_early": exports and early}
        one = request(request_id, prompt, output_tokens, **kv)
        self.scheduler.add(one, self.driver.now_s)
        self.prompts[request_id], self.requests[request_id] = prompt, one

    @precondition(lambda self: self.reader.reads)
    @rule(place=st.integers(0, 9), arrived=st.booleans())
    def end_a_read(self, place: int, arrived: bool) -> None:
        reads = self.reader.reads
        self.reader.end(reads[place % len(reads)], arrived=arrived)

    @rule(back=st.integers(0, 5))
    def release(self, back: int) -> None:
        exports = [one.export for one in self.requests.values() if one.export is not None]
        for export in exports[-back:][:1]:
            was_held = self.scheduler.exports.is_held(export)
            assert self.scheduler.exports.release(export) is was_held

    @invariant()
    def blocks_and_requests_add_up(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        check_pool(pool)
        states = [one.state for one in scheduler.requests.values()]
        assert scheduler.running == states.count(State.RUNNING)
        assert scheduler.reading == states.count(State.READING)
        assert scheduler.running + scheduler.waiting == len(scheduler.requests)
        running = [one for one in scheduler.requests.values() if one.state is State.RUNNING]
        held = {block for one in [*running, *self.leaving()] for block in one.block_ids}
        for one in self.requests.values():
            if one.export is not None and scheduler.exports.is_held(one.export):
                assert one.export.is_computing == (one.state is State.RUNNING)
                held |= set(one.export.block_ids)
        assert pool.used_blocks == len(held)
        pool.drain_events()

    @invariant()
    def blocks_being_written_stay_held(self) -> None:
        """Assert that no other request holds the private blocks that a read writes."""
        for read in self.reader.reads:
            first = read.start // SIZE
            written = set(read.request.block_ids[first:])
            for one in self.scheduler.requests.values():
                assert one is read.request or written.isdisjoint(one.block_ids)

    def teardown(self) -> None:
        while self.reader.reads:
            self.reader.end(self.reader.reads[0])
        self.driver.run(limit=5000)
        self.scheduler.exports.advance(self.driver.now_s + 2 * LEASE_S)
        super().teardown()


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)

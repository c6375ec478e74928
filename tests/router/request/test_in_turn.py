"""Tests of threads that do the jobs of requests in the order in which the requests arrived."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.in_turn import InTurn
from tests.router.property_support import patient
from tests.router.steps import Steps, run_until_all_wait


async def order_of(jobs_of: list[int], begins: list[int]) -> list[tuple[int, int]]:
    """Return (request, job number) pairs in the order in which the jobs were done, one job a step.
    Request `i` arrives before step `begins[i]` and has `jobs_of[i]` jobs.
    """
    steps, done = Steps(), list[tuple[int, int]]()
    line = InTurn(steps)

    async def request(turn: int) -> None:
        for job in range(jobs_of[turn]):
            await line.run(turn, lambda job=job: done.append((turn, job)))  # type: ignore[misc]

    tasks = []
    for step in range(sum(jobs_of) + max(begins, default=0) + 1):
        tasks += [asyncio.create_task(request(i)) for i, at in enumerate(begins) if at == step]
        await run_until_all_wait()
        steps.step()
    await run_until_all_wait()
    await asyncio.gather(*tasks)
    return done


@patient
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), max_size=12))
def test_a_request_never_waits_for_a_later_one(made: list[tuple[int, int]]) -> None:
    """A request never waits for a later one: the order is that of a queue which is sorted by
    arrival before each step.
    """
    made.sort(key=lambda one: one[1])
    jobs_of, begins = [jobs for jobs, _ in made], [at for _, at in made]
    expected, left = [], dict(enumerate(jobs_of))
    for step in range(sum(jobs_of) + max(begins, default=0) + 1):
        there = [turn for turn, jobs in left.items() if jobs and begins[turn] <= step]
        if there:
            turn = min(there)
            expected.append((turn, jobs_of[turn] - left[turn]))
            left[turn] -= 1
    assert asyncio.run(order_of(jobs_of, begins)) == expected


async def test_results_and_exceptions_of_jobs_are_returned() -> None:
    with ThreadPoolExecutor(2) as executor:
        line = InTurn(executor)
        assert await line.run(0, lambda: threading.current_thread().name) != "MainThread"
        with pytest.raises(ZeroDivisionError):
            await line.run(1, lambda: 1 // 0)


class Body:
    """An object to which a weak reference can be made; it stands for a large request body."""


@pytest.mark.parametrize("fails", [False, True])
async def test_finished_jobs_leave_no_memory(fails: bool) -> None:
    """Finished work leaves no memory behind without the garbage collector, which seldom runs in a
    router.
    """
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as executor:
            body = Body()
            seen = weakref.ref(body)
            work = {False: lambda body=body: 1, True: lambda body=body: 1 // 0}[fails]
            del body
            try:
                await InTurn(executor).run(0, work)
            except ZeroDivisionError:
                assert fails
            del work
            await run_until_all_wait()
        assert seen() is None
    finally:
        gc.enable()


async def test_the_job_of_a_client_that_left_is_dropped_immediately() -> None:
    steps, done = Steps(), list[str]()
    line = InTurn(steps)
    body = Body()
    seen = weakref.ref(body)

    def work(body: Body = body) -> None:
        done.append("left")

    task = asyncio.create_task(line.run(0, work))
    stays = asyncio.create_task(line.run(1, lambda: done.append("stays")))
    await run_until_all_wait()
    task.cancel()
    del work, body
    await run_until_all_wait()
    assert task.cancelled()
    assert seen() is None, "its body must not stay until a thread comes to it"
    while steps.step():
        await run_until_all_wait()
    assert done == ["stays"]
    assert stays.done()

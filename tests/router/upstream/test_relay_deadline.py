"""Tests of a deadline of a stream that every event moves on."""

from __future__ import annotations

import asyncio

from router.upstream.fallback import Deadline
from tests.router.relay_support import until


async def test_a_deadline_fires_once_when_its_time_has_passed_on_the_given_clock() -> None:
    now_s = 100.0
    looks = 0
    passed: list[float] = []

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now_s

    deadline = Deadline(clock)
    deadline.start(0.001, lambda: passed.append(now_s))
    deadline.push(100.002)
    await until(lambda: looks > 5, "the timer fired and looked again")
    assert not passed
    now_s = 100.003
    await until(lambda: passed == [100.003], "the moment has passed")


async def test_start_replaces_a_deadline_and_stop_cancels_it() -> None:
    passed: list[str] = []
    loop = asyncio.get_running_loop()
    deadline = Deadline(loop.time)
    deadline.start(3600.0, lambda: passed.append("never"))
    deadline.start(0.001, lambda: passed.append("late"))  # sooner than before
    await until(lambda: passed == ["late"], "the sooner moment counts")
    deadline.start(0.001, lambda: passed.append("never"))
    deadline.stop()
    deadline.stop()
    end_s = loop.time() + 0.02
    await until(lambda: loop.time() > end_s, "the moment passes")
    assert passed == ["late"]

"""Tests of sharing one answer among all callers that ask at about the same time."""

from __future__ import annotations

import asyncio
import gc

import pytest

from router.fleet.context import SharedAnswer, SharedAnswers


class Engine:
    """Answers with the number of the question, when the test says so or at once. Lifetime: test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()

    def clock(self) -> float:
        return self.now_s

    async def answer(self) -> int:
        self.asked += 1
        number = self.asked
        await self.open.wait()
        if number == 3:
            raise TimeoutError("the third question is one too many")
        return number


async def test_callers_during_a_request_wait_for_the_same_answer() -> None:
    engine, shared = Engine(), SharedAnswer[int]()
    engine.open.clear()
    asking = [asyncio.create_task(shared.get(engine.answer, engine.clock, 1.0)) for _ in range(5)]
    await asyncio.sleep(0)
    engine.open.set()
    assert await asyncio.gather(*asking) == [1] * 5


async def test_answers_and_failures_are_cached_for_a_while() -> None:
    engine, shared = Engine(), SharedAnswer[int]()
    assert await shared.get(engine.answer, engine.clock, 1.0) == 1
    engine.now_s = 1.0
    assert await shared.get(engine.answer, engine.clock, 1.0) == 1
    engine.now_s = 1.1
    assert await shared.get(engine.answer, engine.clock, 1.0) == 2
    engine.now_s = 3.0
    for _ in range(3):
        with pytest.raises(TimeoutError, match="third"):
            await shared.get(engine.answer, engine.clock, 1.0)
    assert engine.asked == 3
    engine.now_s = 5.0
    assert await shared.get(engine.answer, engine.clock, 1.0) == 4


async def test_if_the_first_caller_is_cancelled_the_next_one_sends_the_request() -> None:
    engine, shared = Engine(), SharedAnswer[int]()
    engine.open.clear()
    first, second = (
        asyncio.create_task(shared.get(engine.answer, engine.clock, 1.0)) for _ in range(2)
    )
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    engine.open.set()
    assert await second == 2


async def test_a_shared_answer_is_dropped_with_its_last_user() -> None:
    answers = SharedAnswers()
    one = answers.to("url")
    assert answers.to("url") is one
    assert answers.to("other") is not one
    engine = Engine()
    await one.get(engine.answer, engine.clock, 1.0)
    del one
    gc.collect()
    assert await answers.to("url").get(engine.answer, engine.clock, 1.0) == 2

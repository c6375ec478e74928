"""Tests that an engine is asked for its version once for all tasks that need it, and
never earlier.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from engine.wire.events import WireError
from router.engines.adapter import NO_VERSION, EngineReply, EngineVersion
from router.fleet.engine_version import EngineQuestion, Told

KNOWN = EngineVersion("1", None, "/version")


@dataclass
class Engine:
    """An engine whose answers wait until the test releases them. Lifetime: test."""

    version: str = "1"
    status: int = 200
    faults: list[Exception] = field(default_factory=list)
    asked: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    question: EngineQuestion = field(default_factory=EngineQuestion)

    async def answer(self) -> EngineReply:
        self.asked += 1
        await self.gate.wait()
        if self.faults:
            raise self.faults.pop(0)
        return EngineReply(self.status, b'{"version": "%b"}' % self.version.encode())

    async def ask_version(self, known: EngineVersion = KNOWN) -> Told:
        return await self.question.put(self.answer, known)


async def test_simultaneous_callers_share_one_version_request() -> None:
    engine = Engine()
    asks = [asyncio.create_task(engine.ask_version()) for _ in range(50)]
    await asyncio.sleep(0)
    engine.gate.set()
    assert set(await asyncio.gather(*asks)) == {"same"}
    assert engine.asked == 1


async def test_callers_during_a_version_request_share_the_next_one() -> None:
    engine = Engine()
    first = asyncio.create_task(engine.ask_version())
    for _ in range(3):
        await asyncio.sleep(0)
    later = [asyncio.create_task(engine.ask_version()) for _ in range(9)]
    await asyncio.sleep(0)
    assert engine.asked == 1
    later.pop().cancel()
    engine.gate.set()
    assert await first == "same"
    engine.version = "2"
    assert set(await asyncio.gather(*later)) <= {"same", "other"}
    assert engine.asked == 2
    assert await engine.ask_version() == "other"


@pytest.mark.parametrize(
    ("faults", "status", "told", "times"),
    [
        ([], 200, "same", 1),
        ([], 404, "other", 1),
        ([], 503, "unknown", 1),
        ([WireError("closed")], 200, "same", 2),
        ([WireError("closed"), WireError("refused")], 200, "other", 2),
        ([TimeoutError()], 200, "unknown", 1),
    ],
)
async def test_a_version_request_on_a_closed_connection_is_repeated(
    faults: list[Exception], status: int, told: str, times: int
) -> None:
    engine = Engine(faults=list(faults), status=status)
    engine.gate.set()
    assert await engine.ask_version() == told
    assert engine.asked == times


async def test_an_engine_that_does_not_answer_gets_no_version_request_for_a_while() -> None:
    now = [10.0]
    engine = Engine(faults=[TimeoutError()], question=EngineQuestion(lambda: now[0]))
    first = asyncio.create_task(engine.ask_version())
    for _ in range(3):
        await asyncio.sleep(0)
    later = [asyncio.create_task(engine.ask_version()) for _ in range(9)]
    await asyncio.sleep(0)
    engine.gate.set()
    assert set(await asyncio.gather(first, *later)) == {"unknown"}
    now[0] += 2.9
    assert await engine.ask_version() == "unknown"
    assert engine.asked == 1
    now[0] += 0.2
    assert await engine.ask_version() == "same"
    assert engine.asked == 2


async def test_an_engine_without_a_version_gets_no_version_request() -> None:
    engine = Engine()
    assert await engine.ask_version(NO_VERSION) == "same"
    assert engine.asked == 0

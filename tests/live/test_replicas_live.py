"""Tests that the live decisions of several routers are like those of one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from simulator.live.outcome import Outcome
from simulator.live.stack import StackSettings, run_scenario
from tests.bench.replicas_live import LOADS, compared, differences, table
from tests.live.redis_server import needs_redis, redis_server
from tests.simulator.made_up import shared_prompt

TIMEOUT_S = 120.0


@needs_redis
async def test_two_routers_take_requests_in_turn_and_leave_none_in_flight(tmp_path: Path) -> None:
    work = shared_prompt(24, 600, 70, 6, 20.0)
    seen: list[Outcome] = []
    with redis_server(tmp_path / "redis") as server:
        settings = StackSettings("round_robin", workers=2, routers=2, state=server.url)
        async with asyncio.timeout(TIMEOUT_S):
            result = await run_scenario(work, settings, tmp_path, seen.append)
    assert [outcome.error for outcome in seen if outcome.error] == []
    assert result.leftovers == ()
    assert (result.row.completed, result.row.failed) == (24, 0)
    # Each router alternates over its own half of the requests: the workers show that both were
    # used.
    by_turns = {outcome.serial: outcome.worker for outcome in result.outcomes}
    halves = [[by_turns[serial] for serial in range(first, 24, 2)] for first in (0, 1)]
    assert all(half[0::2] != half[1::2] and len(set(half[0::2])) == 1 for half in halves), halves


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(600)
@needs_redis
@pytest.mark.parametrize("name", ["shared", "chats"])
async def test_two_routers_decide_nearly_like_one(tmp_path: Path, name: str) -> None:
    settings = StackSettings("warmset", workers=4, speed=0.5)
    told: list[str] = []
    runs = await compared(
        LOADS[name], name, settings, 20.0, 1, tmp_path, told.append, routers=(1, 2)
    )
    assert len(told) == 2
    assert all(one.lost == 0 and one.requests > 100 for (one,) in runs.values())
    beyond = {what: found[0] for what, found in differences(runs, 2).items()}
    # Five times the bounds of a bench that repeats itself, since this is one run on a busy machine.
    assert beyond["mean TTFT"] < 25.0, table(name, runs)
    assert beyond["p99 TTFT"] < 50.0, table(name, runs)
    assert beyond["hits"] > -5.0, table(name, runs)

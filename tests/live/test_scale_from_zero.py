"""Tests of a pool that an autoscaler starts and stops by the router's metrics in a real Prometheus.

No request is refused while no worker runs; then the most urgent go first, and not all at once.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.record.facts import records
from simulator.live.processes import Program, Programs
from tests.grafana.monitoring import Prometheus, prometheus
from tests.live.ports import lasting_port
from tests.live.stack import MODEL, Stack, engine_arguments, until

PER_S = 8
CROWD, CROWD_TOKENS = 24, 66
WAKE = f'sum(warmroute_waiting_requests{{model="{MODEL}"}})'
BUSY = f'{WAKE} + sum(warmroute_running_requests{{model="{MODEL}"}})'
IDLE_LOOKS = 4  # idle readings in a row before the engine is stopped


@dataclass(slots=True)
class Autoscaler:
    """Starts an engine while requests wait, and stops it while there are no requests. Lifetime:
    test.
    """

    programs: Programs
    server: Prometheus
    flags: list[str]
    engine: Program | None = None
    changes: list[str] = field(default_factory=list)

    async def run(self) -> None:
        idle = 0
        while True:
            if self.engine is None:
                if await self._query(WAKE) > 0:
                    name = f"engine-{len(self.changes)}"
                    self.engine = await self.programs.start(name, "engine", self.flags)
                    self.changes.append("started")
                    idle = 0
            elif await self._query(BUSY) > 0:
                idle = 0
            elif (idle := idle + 1) >= IDLE_LOOKS:
                engine, self.engine = self.engine, None
                engine.process.terminate()
                self.changes.append("stopped")
                await engine.process.wait()
            await asyncio.sleep(0.25)

    async def _query(self, expr: str) -> float:
        """Return the value of a Prometheus query. Fails if there is no series, because an
        autoscaler would then do nothing.
        """
        rows = await self.server.query(expr)
        assert rows, f"{expr} has no series"
        return float(rows[0]["value"][1])


@asynccontextmanager
async def scaled(folder: Path) -> AsyncIterator[tuple[Stack, Autoscaler, Path]]:
    """Yield a router whose one engine is started and stopped by an autoscaler."""
    facts, port = folder / "facts", lasting_port()
    arguments = [
        *("serve", "--port", "0", "--admin-port", "0", "--record-facts", str(facts)),
        *("--worker", f"http://127.0.0.1:{port}", "--waiting-models", MODEL),
        *("--waiting-per-s", str(PER_S), "--waiting-wait-s", "120"),
    ]
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        stack = Stack(programs, await programs.start("router", "router", arguments), [], http)
        async with prometheus(http, folder, {"warmroute": [stack.admin]}) as server:

            async def scraped() -> bool:
                return bool(await server.query(WAKE))

            await until(scraped, "the first scrape")
            scaler = Autoscaler(programs, server, engine_arguments(port=port))
            task = asyncio.create_task(scaler.run())
            try:
                yield stack, scaler, facts
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise error


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
async def test_a_pool_scales_from_zero_to_one_worker_and_back_three_times(tmp_path: Path) -> None:
    async with scaled(tmp_path) as (stack, scaler, facts):
        status, answer = await stack.complete([1], model="unheard of")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        for number in range(3):
            await _one_round(stack, scaler, number)
        assert scaler.changes == ["started", "stopped"] * 3 + ["started"]
        ends = {
            end: await stack.metric(f'warmroute_first_worker_waits_total{{end="{end}"}}')
            for end in ("late", "refused", "displaced", "left")
        }
        assert not any(ends.values()), ends
        await stack.assert_idle()
    waves = _waves(facts)
    assert [len(wave) for wave in waves] == [CROWD] * 3
    for arrivals in waves:
        _assert_order_and_pace(arrivals)


async def _one_round(stack: Stack, scaler: Autoscaler, number: int) -> None:
    """Send many requests while no engine runs, then others, and the last ones as the
    engine stops.
    """
    prompts = [[number, n, *range(CROWD_TOKENS - 2)] for n in range(CROWD)]
    crowd = [
        asyncio.create_task(stack.complete(prompt, priority=n % 3))
        for n, prompt in enumerate(prompts)
    ]
    assert {status for status, _ in await asyncio.gather(*crowd)} == {200}
    after = [await stack.complete([number, n, 7]) for n in range(20)]
    assert {status for status, _ in after} == {200}
    stops = len(scaler.changes)

    async def stopped() -> bool:
        return len(scaler.changes) > stops

    await until(stopped, "the engine's stop")
    if number == 2:  # at that very moment, as the engine ends; another one is started
        late = [asyncio.create_task(stack.complete([number, n, 9])) for n in range(5)]
        assert {status for status, _ in await asyncio.gather(*late)} == {200}
    else:

        async def gone() -> bool:
            return scaler.engine is None and (await stack.row(0))["state"] != "ready"

        await until(gone, "the router to know it")


def _waves(facts: Path) -> list[list[dict[str, Any]]]:
    """Return for each round the arrivals at the core, in the order in which the router sent them
    on.
    """
    arrivals = [
        record[2]
        for record in list(records(facts))[1:]
        if record[:2] == ["fact", "Arrival"] and record[2]["prompt_tokens"] == CROWD_TOKENS
    ]
    return [arrivals[n : n + CROWD] for n in range(0, len(arrivals), CROWD)]


def _assert_order_and_pace(arrivals: list[dict[str, Any]]) -> None:
    assert [one["priority"] for one in arrivals] == sorted(one["priority"] for one in arrivals)
    began_s = arrivals[0]["now_s"]
    for count, one in enumerate(arrivals, 1):
        seconds = int(one["now_s"] - began_s) + 2
        assert count <= PER_S * seconds * (seconds + 1) // 2

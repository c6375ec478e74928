"""Tests that the plans of `warmroute-sim instances` match real Tritons with models that sleep."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import warnings
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from simulator.capacity.batches import Batches, BatchSize, fit, read_measured
from simulator.capacity.instances import ArrivingLoad, Row, row
from tests.engines.environment import NEWEST_TRITON, Environment
from tests.engines.triton_server import TritonServer

SOURCE = Path(__file__).with_name("sleep_model.py")
BASE_S, PER_REQUEST_S, MAX_BATCH = 0.020, 0.004, 8
CASES = ((1, 60.0), (3, 180.0))  # instances, requests per second
REQUESTS = 600
RUNS = 3  # of each case that are judged, together, by their medians
TRIES = 24  # for as many while the machine was quiet
QUIET_S = 0.011  # a sleep of 10 ms, mean: beyond it the machine was too busy to time anything
CONFIG = """\
backend: "python"
max_batch_size: %d
dynamic_batching { }
input [ { name: "x" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: %d } ]
parameters [
  { key: "base_s" value: { string_value: "%g" } },
  { key: "per_request_s" value: { string_value: "%g" } }
]
"""
SLEEPER = """\
import select, sys, time
print(flush=True)
count, begin = 0, time.perf_counter()
while not select.select([sys.stdin], [], [], 0)[0]:
    time.sleep(0.01)
    count += 1
print((time.perf_counter() - begin) / max(count, 1))
"""
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [7]}]})


@dataclass(slots=True)
class SleepTriton(TritonServer):
    """A `tritonserver` with one model for each number of instances. Lifetime: test."""

    def repository(self) -> Path:
        """Create a model for each case; return the folder."""
        models = self.folder / "models"
        for count, _ in CASES:
            version = models / f"sleep{count}" / "1"
            version.mkdir(parents=True, exist_ok=True)
            told = CONFIG % (MAX_BATCH, count, BASE_S, PER_REQUEST_S)
            (version.parent / "config.pbtxt").write_text(told)
            shutil.copy(SOURCE, version / "model.py")
        return models


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of a load run: Triton's batch counts and the client's latencies.
    Lifetime: test.
    """

    sizes: list[BatchSize]
    latencies_s: np.ndarray
    span_s: float
    sleep_s: float  # what a sleep of 10 ms took beside it, mean

    @property
    def batch(self) -> float:
        return sum(s.batch * s.count for s in self.sizes) / sum(s.count for s in self.sizes)

    def utilisation(self, instances: int) -> float:
        return sum(s.seconds * s.count for s in self.sizes) / self.span_s / instances


async def stats(http: aiohttp.ClientSession, url: str) -> dict[int, tuple[int, int]]:
    """Return the model's (executions, nanoseconds) by batch size."""
    async with http.get(f"{url}/stats") as reply:
        (model,) = json.loads(await reply.read())["model_stats"]
    parts = ("compute_input", "compute_infer", "compute_output")
    return {
        one["batch_size"]: (one["compute_infer"]["count"], sum(one[part]["ns"] for part in parts))
        for one in model["batch_stats"]
    }


@asynccontextmanager
async def slept() -> AsyncIterator[list[float]]:
    """Measure during the block how long a sleep of 10 ms takes in another process; the list gets
    the mean at the end.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SLEEPER, stdin=pipe, stdout=pipe
    )
    assert process.stdout is not None
    await process.stdout.readline()
    found: list[float] = []
    try:
        yield found
    finally:
        told, _ = await process.communicate(b"\n")
        found.append(float(told))


async def loaded(http: aiohttp.ClientSession, url: str, gaps_s: Iterable[float]) -> Seen:
    """Send requests with these gaps between them, whether or not earlier ones were answered."""
    clock = asyncio.get_running_loop().time
    latencies: list[float] = []

    async def one() -> None:
        begin_s = clock()
        async with http.post(f"{url}/infer", data=BODY) as reply:
            await reply.read()
            assert reply.status == 200
        latencies.append(clock() - begin_s)

    before = await stats(http, url)
    async with slept() as sleeps, asyncio.TaskGroup() as group:
        begin_s = at_s = clock()
        for gap_s in gaps_s:
            at_s += gap_s
            await asyncio.sleep(at_s - clock())
            group.create_task(one())
        span_s = clock() - begin_s
    now = await stats(http, url)
    return Seen(between(before, now), np.array(latencies), span_s, sleeps[0])


def between(before: dict[int, Any], now: dict[int, Any]) -> list[BatchSize]:
    """Return the mean execution time for each batch size between two readings."""
    found = []
    for batch, (count, ns) in sorted(now.items()):
        then, then_ns = before.get(batch, (0, 0))
        if count > then:
            found.append(BatchSize(batch, count - then, (ns - then_ns) / 1e9 / (count - then)))
    return found


async def measured(server: SleepTriton, model: str, count: int) -> Batches:
    """Return the batch times that `warmroute doctor --measure` finds."""
    path = server.folder / f"{model}.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "doctor", f"{server.url},metrics={server.metrics_url}"),
        *("--probe", "--probe-model", model, "--probe-concurrency", str(12 * count)),
        *("--seconds", "1", "--measure", str(path), "--quiet"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() in (0, 1)
    found = read_measured(path)
    assert (found.model, found.max_batch_size, found.instances) == (model, MAX_BATCH, count)
    return fit(found)


def differences(planned: Row, seen: Seen, rate: float, instances: int) -> dict[str, float]:
    """Return the plan's errors as shares of their bounds; more than 1 exceeds the bound."""
    p50_s = float(np.median(seen.latencies_s))
    return {
        "batch": abs(planned.batch / seen.batch - 1) / 0.10,
        "throughput": abs(rate / (len(seen.latencies_s) / seen.span_s) - 1) / 0.10,
        "utilisation": abs(planned.utilisation - seen.utilisation(instances)) / 0.05,
        "p50": abs(planned.p50_s / p50_s - 1) / 0.15,
    }


@pytest.mark.parametrize(
    ("instances", "rate"), [pytest.param(*CASES[0], marks=pytest.mark.full), CASES[1]]
)
async def test_the_planners_prediction_equals_tritons_measurement(
    tmp_path: Path, instances: int, rate: float
) -> None:
    environment = Environment("triton", NEWEST_TRITON).or_skip()
    server = SleepTriton(environment, SOURCE, tmp_path)
    connector = aiohttp.TCPConnector(limit=0)
    noisy, off = [], []
    async with aiohttp.ClientSession(connector=connector) as http:
        try:
            await server.start()
            await server.until_healthy()
            url = f"{server.url}/v2/models/sleep{instances}"
            batches = await measured(server, f"sleep{instances}", instances)
            for seed in range(TRIES):
                if len(off) == RUNS:
                    break
                gaps = np.random.default_rng(seed).exponential(1.0, REQUESTS)
                seen = await loaded(http, url, (gaps / gaps.mean() / rate).tolist())
                if seen.sleep_s >= QUIET_S:
                    noisy.append(seen.sleep_s)
                    continue
                planned = row(ArrivingLoad(rate), batches.seconds, instances)
                off.append(differences(planned, seen, rate, instances))
                told = " ".join(f"{name} {share:.0%}" for name, share in off[-1].items())
                print(f"\n{instances} instances, {rate:g}/s: of what it may be off: {told}")
        finally:
            await http.close()
            await server.stop()
    if noisy:
        warnings.warn(f"{len(noisy)} runs discarded: 10 ms took {noisy}", stacklevel=1)
    if not off:
        pytest.skip(f"this machine is too busy: a sleep of 10 ms took {min(noisy) * 1e3:.1f} ms")
    medians = {name: float(np.median([one[name] for one in off])) for name in off[0]}
    assert max(medians.values()) <= 1, off

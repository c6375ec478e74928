"""Tests that compare a simulated pool of two prefill and two decode workers with its replay."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from simulator.live.client import Target
from simulator.live.load import opened, run_load
from simulator.live.outcome import LiveVerdict, Outcome
from simulator.live.processes import Programs
from simulator.replay.run import replay
from simulator.replay.setup import RouterSettings, Setup, WorkerGroup, World
from simulator.traces.spec import WorkloadSpec
from tests.effort import QUICK
from tests.live.stack import MODEL, Stack
from tests.pauses import measured

PROFILE, SPEED, BLOCK = "qwen3-32b-h100-tp2", 0.3, 64
# Prompts of some 5,000 tokens: a prefill takes 300 ms, so a call's overhead is a small share.
SOURCE = "gen:zipf?groups=1000&exponent=0&system=512&question=4500*0.3&output=60*0.4&rate={rate}"
GBYTES_PER_S, LATENCY_MS = 25.0, 5.0
POLICY = "least_requests"
ROLES = ("prefill", "prefill", "decode", "decode")


async def live(folder: Path, spec: WorkloadSpec) -> list[Outcome]:
    """Run the workload against real programs; return each request's outcome in wall-clock times."""
    outcomes: list[Outcome] = []
    workload = opened(spec, "split", spec.source)
    flags = ["--port", "0", "--timed", PROFILE, "--speed", f"{SPEED}", "--block-size", f"{BLOCK}"]
    flags += ["--model-name", MODEL, "--kv-gbytes-per-s", f"{GBYTES_PER_S}"]
    flags += ["--kv-latency-ms", f"{LATENCY_MS}"]
    async with Programs(folder / "logs") as programs, aiohttp.ClientSession() as http:
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--policy", POLICY]
        arguments += ["--disaggregation", "always"]
        workers = []
        for number, role in enumerate(ROLES):
            made = await programs.start(f"{role}-{number}", "engine", [*flags, "--role", role])
            workers.append(made)
            arguments += ["--worker", f"{made.url},role={role}"]
        router = await programs.start("router", "router", arguments)
        stack = Stack(programs, router, workers, http)
        for worker_id in range(len(workers)):
            await stack.until_state(worker_id, "ready")
        target = Target(router.url, MODEL, workload.block_tokens)
        await run_load(workload, target, outcomes.append, SPEED)
        await stack.assert_idle()
    return outcomes


async def both(folder: Path, spec: WorkloadSpec) -> tuple[float, float, float, float]:
    """Return (mean TTFT in ms, mean finish time in s) of the live run and then of the replay.

    Finish times count from the start of the run. If all requests arrive at once, throughput is
    proportional to one over the mean finish time, on which the last request has little weight.
    """
    outcomes = await live(folder, spec)
    assert all(one.verdict is LiveVerdict.COMPLETED for one in outcomes)
    result = replay(
        Setup(
            spec,
            POLICY,
            tuple(WorkerGroup(2, PROFILE, role=role) for role in ("prefill", "decode")),
            block_size=BLOCK,
            # One link for all GPUs of a worker, as the timed workers have it.
            world=World(link_gbps=GBYTES_PER_S * 8 / 2, link_setup_ms=LATENCY_MS),
            router=RouterSettings(disaggregation="always"),
        )
    )
    table = result.table
    assert result.split_requests == len(outcomes)
    live_ms = SPEED * float(np.mean([one.ttft_ms for one in outcomes if one.ttft_ms is not None]))
    live_s = SPEED * float(np.mean([one.scheduled_s + one.e2e_ms / 1e3 for one in outcomes]))
    replayed_ms = float(np.mean(table.first_token_ns - table.arrival_ns)) / 1e6
    replayed_s = float(np.mean(table.finish_ns)) / 1e9
    print(f"TTFT {live_ms:.1f} ms live, {replayed_ms:.1f} replayed;", end=" ")
    print(f"answered after {live_s:.2f} s live, {replayed_s:.2f} replayed")
    return live_ms, live_s, replayed_ms, replayed_s


def is_close(figures: tuple[float, float, float, float]) -> bool:
    live_ms, live_s, replayed_ms, replayed_s = figures
    return abs(replayed_ms / live_ms - 1) < 0.05 and abs(replayed_s / live_s - 1) < 0.02


async def test_a_replay_of_two_prefill_and_two_decode_workers_matches_the_live_pool(
    tmp_path: Path,
) -> None:
    spec = WorkloadSpec(SOURCE.format(rate=3), requests=15 if QUICK else 45)
    assert is_close(found := await measured(partial(both, tmp_path, spec), is_close)), found


@pytest.mark.full
async def test_a_replay_of_a_saturated_pool_has_the_live_pools_throughput(tmp_path: Path) -> None:
    """A replay of a pool at its limit has the throughput of the live pool; all requests arrive at
    once, so that the pool is the limit and not the clients.
    """
    spec = WorkloadSpec(SOURCE.format(rate="inf"), requests=20 if QUICK else 50)
    assert is_close(found := await measured(partial(both, tmp_path, spec), is_close)), found

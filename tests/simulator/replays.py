"""Makes small workloads for tests of the replay, and a pool of a few workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from simulator.replay.result import ReplayResult
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup
from simulator.traces.job import ErrorLog, Job, JobStream
from simulator.traces.spec import WorkloadSpec

BLOCK = 16
PROFILE = "llama-3.1-8b-h100"


def job(at_ms: float, prompt: int, output: int, trunk: int = 0, own: int = 0, **more: Any) -> Job:
    """Return a request; `trunk` (0..63) decides the first half of its prompt, and `own`
    the rest.
    """
    blocks = prompt // BLOCK
    half = blocks // 2
    ids = np.arange(blocks, dtype=np.uint64) + np.uint64(
        ((own * 64 + trunk) * 64 + 1) * 1_000_000 + blocks * 4096
    )
    ids[:half] = np.arange(half, dtype=np.uint64) + np.uint64(trunk * 1_000_000)
    return Job(int(at_ms * 1e6), prompt, output, ids, **more)


def steady(count: int, every_ms: float, prompt: int = 640, output: int = 20) -> list[Job]:
    """Return requests at equal intervals, which begin with four shared prefixes in turn."""
    return [job(n * every_ms, prompt, output, trunk=n % 4, own=n + 10) for n in range(count)]


def stream_of(jobs: Sequence[Job], block_tokens: int = BLOCK) -> JobStream:
    """Return `jobs` as the stream that a replay reads."""
    return JobStream(
        "test", block_tokens, iter(jobs), len(jobs), ErrorLog("test"), "made up", lambda: 1.0
    )


def pool(count: int = 2, **more: Any) -> WorkerGroup:
    """Return a group of `count` equal workers."""
    return WorkerGroup(count, PROFILE, **more)


def setup_of(policy: str = "round_robin", *groups: WorkerGroup, **more: Any) -> Setup:
    """Return a set-up for a workload that the test passes to the replay itself."""
    return Setup(WorkloadSpec("by hand"), policy, groups or (pool(),), **more)


def at_most_two(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Give no worker a third request, so that the request is held: a policy for tests."""
    costs: Floats = np.where(fleet.requests < 2, fleet.requests.astype(np.float64), np.inf)
    return costs


def run(jobs: Sequence[Job], setup: Setup | None = None, **more: Any) -> ReplayResult:
    """Replay the requests `jobs` and return the result."""
    return replay(setup or setup_of(), stream=stream_of(jobs), **more)

"""Replays that anchors share: the pool, the workload and the world as a source has them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import msgspec

from simulator.replay.result import ReplayResult
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup, World
from simulator.report.row import ReplayRow, StageRow, summarize
from simulator.traces.spec import WorkloadSpec

PLAIN = World()


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that are alike, without our engine's wait for prompts that others compute."""

    count: int
    profile: str
    kv_tokens: int | None = None  # None: as the profile has it
    host_kv_tokens: int | None = None
    speed: float = 1.0

    @property
    def group(self) -> WorkerGroup:
        """As a replay takes it."""
        group = WorkerGroup(
            self.count, self.profile, self.kv_tokens, self.speed, prefix_wait_tokens=0
        )
        if self.host_kv_tokens is None:
            return group
        return msgspec.structs.replace(group, host_kv_tokens=self.host_kv_tokens)


@cache
def result(
    source: str,
    policy: str,
    pool: Pool,
    *,
    seed: int = 0,
    block_size: int | None = 16,  # None: the trace's own
    requests: int | None = None,
    speed: float = 1.0,
    spread_s: float = 0.0,
    closed_loop: bool = False,
    world: World = PLAIN,
) -> tuple[ReplayRow, ReplayResult]:
    """The row of a replay under `policy`, and what it was made of."""
    spec = WorkloadSpec(source, requests=requests, speed=speed, spread_s=spread_s)
    setup = Setup(
        spec, policy, (pool.group,), block_size, seed, closed_loop=closed_loop, world=world
    )
    found = replay(setup)
    return summarize(found), found


def row(source: str, policy: str, pool: Pool, **options: object) -> ReplayRow:
    """The row of that replay."""
    return result(source, policy, pool, **options)[0]  # type: ignore[arg-type]


def stages(found: ReplayRow) -> dict[float, StageRow]:
    """The stages of a ladder by their rate; every request of them was answered."""
    assert all(stage.completed == stage.requests for stage in found.stages)
    return {stage.rate_per_s: stage for stage in found.stages}


def number(value: float | None) -> float:
    """A figure that is always there in a replay that answered something."""
    assert value is not None
    return value

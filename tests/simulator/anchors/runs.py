"""Replays that several anchors share: they take the pool, the workload and the world of a published
result.
"""

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
    """A pool of equal workers, without our engine's wait for prompts that other requests are
    computing.
    """

    count: int
    profile: str
    kv_tokens: int | None = None  # None: as the profile has it
    host_kv_tokens: int | None = None
    speed: float = 1.0

    @property
    def group(self) -> WorkerGroup:
        """The pool in the form that a replay takes."""
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
    """Replay `source` under `policy`; return the row of the report and the whole result."""
    spec = WorkloadSpec(source, requests=requests, speed=speed, spread_s=spread_s)
    setup = Setup(
        spec, policy, (pool.group,), block_size, seed, closed_loop=closed_loop, world=world
    )
    found = replay(setup)
    return summarize(found), found


def row(source: str, policy: str, pool: Pool, **options: object) -> ReplayRow:
    """Return only the row of the replay that `result` runs."""
    return result(source, policy, pool, **options)[0]  # type: ignore[arg-type]


def stages(found: ReplayRow) -> dict[float, StageRow]:
    """Return the stages of a ladder by their rate; assert that every request was answered."""
    assert all(stage.completed == stage.requests for stage in found.stages)
    return {stage.rate_per_s: stage for stage in found.stages}


def number(value: float | None) -> float:
    """Return `value`, which is never None in a replay that answered a request."""
    assert value is not None
    return value

"""The same trace live and simulated: timed workers behind a real router, and the replay of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import msgspec

from simulator.load import OnOutcome
from simulator.replay.result import ReplayResult
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup, WorkloadSpec
from simulator.report.row import ReplayRow, summarize
from simulator.scenario import RunResult, run_scenario
from simulator.stack import StackSettings
from simulator.summary import ResultRow
from simulator.validate.compare import Metric, Placements, metric, placements
from simulator.workload import Workload

HIT_POINTS = 2.0  # largest difference of the hit rate, percentage points
TTFT_SHARE = 15.0  # largest difference of the mean time to first token, per cent
LEVEL_SHARE = 2.0  # policies whose mean TTFT is closer than this cannot be told apart, per cent
MEAN_TTFT = "TTFT mean, ms"

World = Literal["live", "simulated"]


class Validation(msgspec.Struct, frozen=True):
    """One policy in both worlds."""

    policy: str
    metrics: tuple[Metric, ...]
    placements: Placements
    # How far this machine kept up with the live side; None: the workers do not say.
    overrun_steps_share: float | None = None  # steps that ended late, of all
    late_p99_ms: float | None = None  # 99 of 100 requests left the generator within this

    @property
    def passed(self) -> bool:
        """Every metric that has a limit is within it."""
        return all(one.passed for one in self.metrics)


async def validate(
    workload: Workload,
    spec: WorkloadSpec,
    policies: Sequence[str],
    stack: StackSettings,
    log_dir: Path,
    on_start: Callable[[str], None],
    on_outcome: OnOutcome,
) -> list[Validation]:
    """Runs `workload`, which `spec` describes, live and simulated for each of `policies`.

    `on_start` hears of each policy before its live run, `on_outcome` of each live request. Raises
    what `run_scenario` and `replay` raise.
    """
    found = []
    for policy in policies:
        on_start(policy)
        settings = replace(stack, policy=policy)
        live = await run_scenario(workload, settings, log_dir, on_outcome)
        found.append(compared(policy, live, replay(_setup(spec, settings))))
    return found


def same_ranking(found: Sequence[Validation]) -> bool:
    """Whether no two policies stand one way by mean TTFT live and the other way simulated.

    Policies closer than `LEVEL_SHARE` are level in that world and contradict nothing.
    """
    pairs = combinations(found, 2)
    return not any(_ahead(a, b, "live") * _ahead(a, b, "simulated") < 0 for a, b in pairs)


def _ahead(one: Validation, other: Validation, world: World) -> int:
    """1 where `one` has the lower mean TTFT, -1 where `other` has, 0 where they are level."""
    mine, theirs = (_mean_ttft(v, world) for v in (one, other))
    if mine == theirs or abs(mine - theirs) <= LEVEL_SHARE / 100 * min(mine, theirs):
        return 0
    return 1 if mine < theirs else -1


def _mean_ttft(validation: Validation, world: World) -> float:
    """Infinite where nothing was completed."""
    metric = next(one for one in validation.metrics if one.name == MEAN_TTFT)
    value: float | None = getattr(metric, world)
    return math.inf if value is None else value


def _setup(spec: WorkloadSpec, stack: StackSettings) -> Setup:
    return Setup(
        workload=spec,
        policy=stack.policy,
        groups=(WorkerGroup(stack.workers, stack.profile, stack.kv_tokens),),
        block_size=stack.block_size,
    )


def compared(policy: str, live: RunResult, simulated: ReplayResult) -> Validation:
    """One run in both worlds: row `serial` of `simulated` is the same request as in `live`."""
    return Validation(
        policy,
        _metrics(live.row, summarize(simulated)),
        placements(live.outcomes, simulated.table, live.workers),
        live.row.overrun_steps_share,
        live.row.generator_late_ms.p99,
    )


def _metrics(live: ResultRow, simulated: ReplayRow) -> tuple[Metric, ...]:
    ttft, tpot, e2e = simulated.ttft_ms, simulated.tpot_ms, simulated.e2e_ms
    return (
        metric("completed", live.completed, simulated.completed, ""),
        metric("rejected", live.rejected, simulated.rejected, ""),
        metric("hit rate", live.hit_rate_tokens, simulated.hit_rate_tokens, "points", HIT_POINTS),
        metric(MEAN_TTFT, live.ttft_ms.mean, ttft.mean, "%", TTFT_SHARE),
        metric("TTFT p50, ms", live.ttft_ms.p50, ttft.p50, "%"),
        metric("TTFT p90, ms", live.ttft_ms.p90, ttft.p90, "%"),
        metric("TTFT p99, ms", live.ttft_ms.p99, ttft.p99, "%"),
        metric("token gap mean, ms", live.itl_ms.mean, tpot.mean, "%"),
        metric("end to end mean, ms", live.e2e_ms.mean, e2e.mean, "%"),
        metric("output tokens/s", live.output_tokens_per_s, simulated.output_tokens_per_s, "%"),
        metric("requests, max / mean", live.load_skew, simulated.load_skew_requests, ""),
    )

"""The same trace live and simulated: timed workers behind a real router, and the replay of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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


class Validation(msgspec.Struct, frozen=True):
    """One policy in both worlds."""

    policy: str
    metrics: tuple[Metric, ...]
    placements: Placements

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
        found.append(_compared(policy, live, replay(_setup(spec, settings))))
    return found


def same_ranking(found: Sequence[Validation]) -> bool:
    """Whether the policies stand in the same order of mean TTFT in both worlds."""

    def order(world: str) -> list[str]:
        known = {v.policy: getattr(_of(v, "TTFT mean, ms"), world) or 0.0 for v in found}
        return sorted(known, key=lambda policy: (known[policy], policy))

    return order("live") == order("simulated")


def _of(validation: Validation, name: str) -> Metric:
    return next(one for one in validation.metrics if one.name == name)


def _setup(spec: WorkloadSpec, stack: StackSettings) -> Setup:
    return Setup(
        workload=spec,
        policy=stack.policy,
        groups=(WorkerGroup(stack.workers, stack.profile, stack.kv_tokens),),
        block_size=stack.block_size,
    )


def _compared(policy: str, live: RunResult, simulated: ReplayResult) -> Validation:
    return Validation(
        policy,
        _metrics(live.row, summarize(simulated)),
        placements(live.outcomes, simulated.table, live.workers),
    )


def _metrics(live: ResultRow, simulated: ReplayRow) -> tuple[Metric, ...]:
    ttft, tpot, e2e = simulated.ttft_ms, simulated.tpot_ms, simulated.e2e_ms
    return (
        metric("completed", live.completed, simulated.completed, ""),
        metric("rejected", live.rejected, simulated.rejected, ""),
        metric("hit rate", live.hit_rate_tokens, simulated.hit_rate_tokens, "points", HIT_POINTS),
        metric("TTFT mean, ms", live.ttft_ms.mean, ttft.mean, "%", TTFT_SHARE),
        metric("TTFT p50, ms", live.ttft_ms.p50, ttft.p50, "%"),
        metric("TTFT p90, ms", live.ttft_ms.p90, ttft.p90, "%"),
        metric("TTFT p99, ms", live.ttft_ms.p99, ttft.p99, "%"),
        metric("token gap mean, ms", live.itl_ms.mean, tpot.mean, "%"),
        metric("end to end mean, ms", live.e2e_ms.mean, e2e.mean, "%"),
        metric("output tokens/s", live.output_tokens_per_s, simulated.output_tokens_per_s, "%"),
        metric("requests, max / mean", live.load_skew, simulated.load_skew_requests, ""),
    )

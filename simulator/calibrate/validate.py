"""Runs the same requests live and simulated, and compares the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from rich.table import Table

from simulator.live.load import OnOutcome, Workload
from simulator.live.outcome import LiveVerdict, Outcome, ResultRow
from simulator.live.stack import RunResult, StackSettings, run_scenario
from simulator.replay.result import I64, NEVER, ReplayResult, RequestTable
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup
from simulator.report.row import ReplayRow, summarize
from simulator.traces.spec import WorkloadSpec

NS_PER_MS = 1_000_000
Unit = Literal["points", "%", ""]


class Metric(msgspec.Struct, frozen=True):
    """One figure of the live run and of the replay. `difference` is the simulated value against the
    live one, in `unit`.
    """

    name: str
    live: float | None
    simulated: float | None
    difference: float | None
    unit: Unit
    limit: float | None  # the largest difference that passes; None: shown only

    @property
    def passed(self) -> bool:
        """True if the difference is within its limit, or there is no limit."""
        if self.limit is None:
            return True
        return self.difference is not None and abs(self.difference) <= self.limit


class Placements(msgspec.Struct, frozen=True):
    """The shares of requests for which live run and replay have the same worker, and the same
    cached tokens.

    Workers are alike, so the workers of one run are first matched to those of the other so that
    most requests agree. Shares are of the requests that both runs completed.
    """

    requests: int
    same_worker: float
    same_hit: float  # of the same number of cached tokens
    other_worker_other_hit: float  # the hit differs, and so does the worker
    same_worker_other_hit: float  # the hit differs although the worker does not
    live_hit_tokens: int
    simulated_hit_tokens: int
    moved_hit_tokens: int  # simulated - live, of requests placed elsewhere
    kept_hit_tokens: int  # simulated - live, of requests on the same worker
    transport_ms: float | None  # median TTFT, live - simulated, of same worker and same hit


def metric(
    name: str, live: float | None, simulated: float | None, unit: Unit, limit: float | None = None
) -> Metric:
    """Return the metric with the difference of the two figures: in points for shares, in per cent
    of the live figure, or in the figure's own unit.
    """
    difference = None
    if live is not None and simulated is not None:
        if unit == "points":
            difference = 100 * (simulated - live)
        elif unit == "%":
            difference = 100 * (simulated / live - 1) if live else None
        else:
            difference = simulated - live
    rounded = None if difference is None else round(difference, 2)
    return Metric(name, live, simulated, rounded, unit, limit)


def placements(
    outcomes: Sequence[Outcome], table: RequestTable, workers: Sequence[str]
) -> Placements:
    """Return how many requests have the same worker and the same cached tokens live and simulated;
    request `serial` of `outcomes` is row `serial` of `table`.

    `workers` has the names of the live workers as in the outcomes; there are as many as in the
    replay.
    """
    both = [
        outcome
        for outcome in outcomes
        if outcome.verdict is LiveVerdict.COMPLETED
        and outcome.worker is not None
        and table.finish_ns[outcome.serial] != NEVER
    ]
    rows = np.array([outcome.serial for outcome in both], dtype=np.int64)
    place = {name: number for number, name in enumerate(workers)}
    live = np.array([place[o.worker] for o in both if o.worker is not None], dtype=np.int64)
    simulated = table.worker[rows].astype(np.int64)
    same_worker = matched(simulated, live, len(workers)) == live
    live_hits = np.array([o.cached_tokens or 0 for o in both], dtype=np.int64)
    gained = table.hit_tokens[rows].astype(np.int64) - live_hits
    same_hit = gained == 0
    return Placements(
        requests=len(both),
        same_worker=_share(same_worker),
        same_hit=_share(same_hit),
        other_worker_other_hit=_share(~same_hit & ~same_worker),
        same_worker_other_hit=_share(~same_hit & same_worker),
        live_hit_tokens=int(live_hits.sum()),
        simulated_hit_tokens=int(table.hit_tokens[rows].sum(dtype=np.int64)),
        moved_hit_tokens=int(gained[~same_worker].sum()),
        kept_hit_tokens=int(gained[same_worker].sum()),
        transport_ms=_transport_ms(both, table, rows, same_worker & same_hit),
    )


def matched(simulated: I64, live: I64, workers: int) -> I64:
    """Return the live worker that corresponds to each of `simulated`, so that most requests agree.

    This is the assignment problem over the number of common requests of each pair (Kuhn, 1955),
    solved by SciPy.
    """
    from scipy.optimize import linear_sum_assignment  # of the extra `sim`, as in `fit`

    met = np.zeros((workers, workers), dtype=np.int64)
    np.add.at(met, (simulated, live), 1)
    _, partner = linear_sum_assignment(met, maximize=True)
    result: I64 = np.asarray(partner, dtype=np.int64)[simulated]
    return result


def _share(rows: npt.NDArray[np.bool_]) -> float:
    return round(float(np.count_nonzero(rows)) / len(rows), 4) if len(rows) else 0.0


def _transport_ms(
    both: Sequence[Outcome], table: RequestTable, rows: I64, alike: npt.NDArray[np.bool_]
) -> float | None:
    """Return the median of the milliseconds that first tokens came later live than in the replay:
    HTTP, hashing, a busy machine. Only requests with the same decision in both runs count.
    """
    extra = [
        outcome.ttft_ms - (table.first_token_ns[row] - table.arrival_ns[row]) / NS_PER_MS
        for outcome, row, chosen in zip(both, rows, alike, strict=True)
        if chosen and outcome.ttft_ms is not None
    ]
    return round(float(np.median(extra)), 3) if extra else None


HIT_POINTS = 2.0  # largest difference of the hit rate, percentage points
TTFT_SHARE = 15.0  # largest difference of the mean time to first token, per cent
LEVEL_SHARE = 2.0  # policies whose mean TTFT is closer than this cannot be told apart, per cent
MEAN_TTFT = "TTFT mean, ms"

World = Literal["live", "simulated"]


class Validation(msgspec.Struct, frozen=True):
    """The comparison of one policy's live run with its replay."""

    policy: str
    metrics: tuple[Metric, ...]
    placements: Placements
    # How far this machine kept up with the live side; None: the workers do not say.
    overrun_steps_share: float | None = None  # steps that ended late, of all
    late_p99_ms: float | None = None  # 99 of 100 requests left the generator within this

    @property
    def passed(self) -> bool:
        """True if every metric that has a limit is within it."""
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
    """Run `workload`, which `spec` describes, live and simulated with each of `policies`.

    `on_start` is called with each policy before its live run, `on_outcome` with each live outcome.
    Raises what `run_scenario` and `replay` raise.
    """
    found = []
    for policy in policies:
        on_start(policy)
        settings = replace(stack, policy=policy)
        live = await run_scenario(workload, settings, log_dir, on_outcome)
        found.append(compared(policy, live, replay(_setup(spec, settings))))
    return found


def same_ranking(found: Sequence[Validation]) -> bool:
    """Return whether the order of the policies by mean TTFT is the same live and simulated.

    Policies that differ by less than `LEVEL_SHARE` in one run count as equal there.
    """
    pairs = combinations(found, 2)
    return not any(_ahead(a, b, "live") * _ahead(a, b, "simulated") < 0 for a, b in pairs)


def _ahead(one: Validation, other: Validation, world: World) -> int:
    """Return 1 if `one` has the lower mean TTFT in this world (live or simulated), -1 if `other`
    has, 0 if they count as equal.
    """
    mine, theirs = (_mean_ttft(v, world) for v in (one, other))
    if mine == theirs or abs(mine - theirs) <= LEVEL_SHARE / 100 * min(mine, theirs):
        return 0
    return 1 if mine < theirs else -1


def _mean_ttft(validation: Validation, world: World) -> float:
    """Return the mean TTFT in this world (live or simulated); infinite if no request was
    completed.
    """
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
    """Return the comparison of a live run with its replay; row `serial` is the same request in
    both.
    """
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


OVERRUNS = 0.02  # above this share of late steps the machine was too slow, as in the demo
LATE_MS = 50.0  # and where the requests themselves left so late


def validation_table(found: Validation) -> Table:
    """Return the table of one policy's metrics, live and simulated."""
    table = Table("figure", "live", "simulated", "difference", "allowed", "", title=found.policy)
    for one in found.metrics:
        allowed = "" if one.limit is None else f"±{one.limit:g} {one.unit}"
        mark = "" if one.limit is None else ("[green]ok[/]" if one.passed else "[red]beyond[/]")
        table.add_row(
            one.name, _value_text(one.live), _value_text(one.simulated), _apart(one), allowed, mark
        )
    return table


def explained(found: Validation) -> list[str]:
    """Return sentences that explain the differences between live run and replay, request by
    request.
    """
    by = found.placements
    if not by.requests:
        return ["no request was completed in both worlds"]
    lines = [
        f"{by.requests:,} requests completed in both: {by.same_worker:.0%} on the same worker, "
        f"{by.same_hit:.0%} with the same hit",
        _hits_explained(by),
    ]
    if by.transport_ms is not None:
        lines.append(
            f"live, a request on the same worker with the same hit had its first token "
            f"{abs(by.transport_ms):.1f} ms {'later' if by.transport_ms >= 0 else 'earlier'} "
            "(median): HTTP, hashing, a machine that also does other work"
        )
    if (found.overrun_steps_share or 0.0) > OVERRUNS or (found.late_p99_ms or 0.0) > LATE_MS:
        lines.append(
            f"live, this machine did not keep up: {found.overrun_steps_share or 0.0:.1%} of steps "
            f"ended late, requests left up to {found.late_p99_ms or 0.0:,.0f} ms late (p99); "
            "trust the simulated side, or run again with less beside it or a lower --live-speed"
        )
    return lines


def summary(found: Sequence[Validation]) -> str:
    """Return one line that says how well the replays of all policies agree with the live runs."""
    order = "the same" if same_ranking(found) else "ANOTHER"
    beyond = [one.policy for one in found if not one.passed]
    limits = f"beyond a limit: {', '.join(beyond)}" if beyond else "all within their limits"
    return f"ranking by mean TTFT: {order} in both worlds; {limits}"


def _hits_explained(by: Placements) -> str:
    if by.same_hit == 1.0:
        return "every hit is the same in both worlds"
    return (
        f"hits that differ: {by.other_worker_other_hit:.0%} of requests were placed elsewhere "
        f"({by.moved_hit_tokens:+,} tokens simulated against live), {by.same_worker_other_hit:.0%} "
        f"found another cache on the same worker ({by.kept_hit_tokens:+,} tokens: an earlier "
        "neighbour was placed elsewhere, or a block was computed or evicted at another moment)"
    )


def _value_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _apart(one: Metric) -> str:
    return "-" if one.difference is None else f"{one.difference:+.1f} {one.unit}"

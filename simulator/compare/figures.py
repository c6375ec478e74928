"""Every rule of a scene in figures, and against one of them, seed by seed.

Times of one load spread over seeds by factors, not by milliseconds: rules are compared by the
geometric mean of the ratios of paired seeds, its 95 % interval by Student's t on their logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from simulator.compare.results import Scene
from simulator.report.aggregate import student_t
from simulator.report.row import ReplayRow

COLLAPSE = 5.0  # times the best rule's best seed
MAX_LOST_SHARE = 0.01  # who loses more is quick with the others only
RATIOS: Mapping[str, Callable[[ReplayRow], float | None]] = {
    "ttft_mean": lambda row: row.ttft_ms.mean,
    "ttft_p99": lambda row: row.ttft_ms.p99,
    "e2e_mean": lambda row: row.e2e_ms.mean,
    "tpot_p90": lambda row: row.tpot_ms.p90,
}


class Ratio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Geometric mean over paired seeds; `low` and `high`, its 95 % interval, are null for one."""

    mean: float
    low: float | None
    high: float | None
    seeds: int


class RuleFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule over its seeds; means of the seeds' own figures. Null: nothing was measured."""

    policy: str
    seeds: tuple[int, ...]
    ttft_mean_ms: float | None
    ttft_median_ms: float | None  # the seed in the middle, by its mean
    ttft_worst_ms: float | None  # the worst seed's mean
    ttft_p99_ms: float | None
    new_ttft_ms: float | None  # mean of requests that began a session
    later_ttft_ms: float | None  # mean of the others
    later_p99_ms: float | None
    held_max_ms: float | None  # longest wait at the router, of any seed
    e2e_mean_ms: float | None
    tpot_p90_ms: float | None
    hit_rate: float | None
    good: float | None  # share of all requests within the goodput limits
    sessions_per_hour: float | None
    preemptions: float | None
    lost_share: float | None  # turned away or lost
    collapsed: int  # seeds
    ttft_by_seed_ms: tuple[float | None, ...]  # in the order of `seeds`
    ratios: dict[str, Ratio | None]  # by the names of `RATIOS`, against the base


class SceneFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One scene; rules in order of their mean time to first token."""

    name: str
    workload: str
    load: float
    load_unit: str
    base: str | None  # null: the base was not run here
    collapse_ms: float | None  # a seed's mean time to first token above it is collapsed
    rules: tuple[RuleFigures, ...]


def compare_scene(scene: Scene, base: str) -> SceneFigures:
    """The figures of all rules, with ratios to `base` where it was run."""
    line = collapse_line_ms(scene)
    there = scene.rows.get(base)
    rules = [_rule(policy, rows, there, line) for policy, rows in scene.rows.items()]
    rules.sort(key=lambda rule: (rule.ttft_mean_ms is None, rule.ttft_mean_ms))
    load = scene.load
    return SceneFigures(
        scene.name,
        scene.setup.workload.source,
        load.value,
        load.unit,
        base if there is not None else None,
        line,
        tuple(rules),
    )


def collapse_line_ms(scene: Scene) -> float | None:
    """`COLLAPSE` times the mean TTFT of the best seed of the rule with the lowest mean.

    Rules that lose requests are left out as long as there is another.
    """
    able = [rows for rows in scene.rows.values() if (lost(list(rows.values())) or 0.0) <= 0.01]
    means = [
        [row.ttft_ms.mean for row in rows.values() if row.ttft_ms.mean is not None]
        for rows in able or scene.rows.values()
    ]
    known = [seeds for seeds in means if seeds]
    return COLLAPSE * min(min(known, key=statistics.fmean)) if known else None


def lost(rows: Sequence[ReplayRow]) -> float | None:
    """Share of all requests that were turned away or lost."""
    requests = sum(row.requests for row in rows)
    return sum(row.rejected + row.failed for row in rows) / requests if requests else None


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio | None:
    """Of (own, other), both above 0; None where there is no such pair."""
    logs = [math.log(own / other) for own, other in pairs if own > 0 and other > 0]
    if not logs:
        return None
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(_factor(mean), None, None, 1)
    half = student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(_factor(mean), _factor(mean - half), _factor(mean + half), len(logs))


def _factor(logarithm: float) -> float:
    """Six digits; an interval of two seeds may be wider than floats reach."""
    return float(f"{math.exp(min(max(logarithm, -700.0), 700.0)):.6g}")


def _rule(
    policy: str,
    by_seed: Mapping[int, ReplayRow],
    base: Mapping[int, ReplayRow] | None,
    line_ms: float | None,
) -> RuleFigures:
    seeds = tuple(sorted(by_seed))
    rows = [by_seed[seed] for seed in seeds]
    times = [row.ttft_ms.mean for row in rows]
    known = [time for time in times if time is not None]
    held = [row.waits.max_ms for row in rows if row.waits.max_ms is not None]
    return RuleFigures(
        policy=policy,
        seeds=seeds,
        ttft_mean_ms=_mean(rows, lambda row: row.ttft_ms.mean),
        ttft_median_ms=statistics.median(known) if known else None,
        ttft_worst_ms=max(known, default=None),
        ttft_p99_ms=_mean(rows, lambda row: row.ttft_ms.p99),
        new_ttft_ms=_mean(rows, lambda row: row.new_sessions.ttft_ms.mean),
        later_ttft_ms=_mean(rows, lambda row: row.continuations.ttft_ms.mean),
        later_p99_ms=_mean(rows, lambda row: row.continuations.ttft_ms.p99),
        held_max_ms=max(held, default=None),
        e2e_mean_ms=_mean(rows, lambda row: row.e2e_ms.mean),
        tpot_p90_ms=_mean(rows, lambda row: row.tpot_ms.p90),
        hit_rate=_mean(rows, lambda row: row.hit_rate_tokens),
        good=_mean(rows, lambda row: row.goodput.share),
        sessions_per_hour=_mean(rows, lambda row: row.sessions.per_hour),
        preemptions=_mean(rows, lambda row: row.preemptions),
        lost_share=lost(rows),
        collapsed=sum(is_collapsed(row, line_ms) for row in rows),
        ttft_by_seed_ms=tuple(times),
        ratios={
            name: None if base is None else _paired(by_seed, base, of)
            for name, of in RATIOS.items()
        },
    )


def is_collapsed(row: ReplayRow, line_ms: float | None) -> bool:
    """Above the line, or so many requests lost that the others' times say nothing."""
    share, mean = lost([row]), row.ttft_ms.mean
    if share is not None and share > MAX_LOST_SHARE:
        return True
    return mean is not None and line_ms is not None and mean > line_ms


def _paired(
    rows: Mapping[int, ReplayRow],
    others: Mapping[int, ReplayRow],
    of: Callable[[ReplayRow], float | None],
) -> Ratio | None:
    pairs = [(of(rows[seed]), of(others[seed])) for seed in sorted(rows) if seed in others]
    return ratio([(own, other) for own, other in pairs if own is not None and other is not None])


def _mean(rows: Sequence[ReplayRow], of: Callable[[ReplayRow], float | None]) -> float | None:
    found = [value for value in map(of, rows) if value is not None]
    return statistics.fmean(found) if found else None

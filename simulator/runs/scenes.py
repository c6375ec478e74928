"""Scenes: results of sweeps that differ only by policy and seed, compared seed by seed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from simulator.replay.setup import Setup
from simulator.report.figures import (
    FAIRNESS,
    GOOD,
    TASK,
    Interval,
    Ratio,
    figure,
    more_seeds,
    paired,
    paired_ratio,
)
from simulator.report.row import ReplayRow
from simulator.runs.points import flat_setup, varied_of
from simulator.runs.store import Record, read_records
from simulator.runs.task import SweepError
from simulator.traces.generators.table import PREFIX, find_generator
from simulator.traces.job import TraceError
from simulator.traces.options import name_of, parse_options
from simulator.traces.session_file import SessionOptions
from simulator.traces.spec import WorkloadSpec

RATE = re.compile(r"(?<=[?&])rate=[^&]*&?")


@dataclass(frozen=True, slots=True)
class SceneLoad:
    """The load of a scene; scenes with equal `of` differ only by their load. Lifetime: report."""

    of: Setup  # the set-up without everything that sets the load
    value: float
    unit: str


def load_of(setup: Setup) -> SceneLoad:
    """Return the set-up's load with its unit.

    It is the requested requests per second, else a generator's own rate, else the speed of a file.
    """
    work = setup.workload
    value, unit = work.speed, "times as fast as recorded"
    rate = _own_rate(work)
    if rate is not None:
        value, unit = rate * work.speed, "begun per second"
    if work.rate_per_s is not None:
        value, unit = work.rate_per_s, "requests per second"
    bare = msgspec.structs.replace(
        work,
        source=_without_rate(work.source) if work.source.startswith(PREFIX) else work.source,
        format=_without_rate(work.format),
        rate_per_s=None,
        speed=1.0,
    )
    return SceneLoad(msgspec.structs.replace(setup, workload=bare, policy="", seed=0), value, unit)


def _own_rate(work: WorkloadSpec) -> float | None:
    """Return the rate of sessions or requests that the generator or format has as an option, or
    None if it has no such option.
    """
    told: object = None
    try:
        if work.source.startswith(PREFIX):
            told = getattr(find_generator(work.source)[1], "rate", None)
        elif name_of(work.format) == "sessions":
            told = parse_options(work.format, SessionOptions).rate
    except TraceError:  # a source of another version, of which only the name is known
        return None
    return told if isinstance(told, float) else None


def _without_rate(text: str) -> str:
    return RATE.sub("", text).rstrip("?&")


GENERATOR = "gen:"
SUFFIXES = (".jsonl", ".results", ".yaml", ".yml")


@dataclass(slots=True)
class Scene:
    """The runs of one workload on one fleet, with several policies and seeds. Lifetime: report."""

    name: str
    file: str  # which results it is of, short
    setup: Setup  # of its first run, without policy and seed
    load: SceneLoad
    rows: dict[str, dict[int, ReplayRow]] = field(default_factory=dict)  # policy -> seed -> row
    failed: list[str] = field(default_factory=list)  # runs without a row, and why


def read_scenes(paths: Sequence[Path]) -> list[Scene]:
    """Return the scenes of all files, in the order of first runs.

    If a file has a run twice (its policy was changed in between), the last one counts. Raises
    `SweepError` for a file that cannot be read, is no file of results, or holds none.
    """
    names = short_names(paths)
    return [
        scene
        for path, name in zip(paths, names, strict=True)
        for scene in _scenes(name, _latest(path))
    ]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return a short name of each file for a report: without suffixes, or in full if two would be
    equal.
    """
    short = [_stem(path) for path in paths]
    return [n if short.count(n) == 1 else str(p) for n, p in zip(short, paths, strict=True)]


def _stem(path: Path) -> str:
    name = path.name
    while name.endswith(SUFFIXES) and name.count("."):
        name = name.rpartition(".")[0]
    return name


def _latest(path: Path) -> list[Record]:
    found: dict[Setup, Record] = {}
    for record in read_records(path):
        before = found.get(record.setup)
        if record.row is not None or before is None or before.row is None:
            found[record.setup] = record
    if not found:
        raise SweepError([f"{path}: holds no run yet; let its sweep go on"])
    return list(found.values())


def _scenes(file: str, records: Sequence[Record]) -> list[Scene]:
    bare = [msgspec.structs.replace(record.setup, policy="", seed=0) for record in records]
    different = list(dict.fromkeys(bare))
    varied = varied_of(different)
    scenes = {
        setup: Scene(_name(file, flat_setup(setup), varied), file, setup, load_of(setup))
        for setup in different
    }
    for setup, record in zip(bare, records, strict=True):
        asked = record.setup
        if record.row is None:
            why = record.error or "no reason was given"
            scenes[setup].failed.append(f"{asked.policy}, seed {asked.seed}: {why}")
        else:
            scenes[setup].rows.setdefault(asked.policy, {})[asked.seed] = record.row
    return list(scenes.values())


def _name(file: str, flat: dict[str, Any], varied: Sequence[str]) -> str:
    return " ".join([file, *(_value_text(name, flat.get(name)) for name in varied)])


def _value_text(name: str, value: Any) -> str:
    if name == "workload.source":
        text = str(value)
        return text.removeprefix(GENERATOR) if text.startswith(GENERATOR) else Path(text).name
    if name == "groups":
        return "+".join(f"{group['count']} at {group['speed']:g}" for group in value)
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"


COLLAPSE = 5.0  # times the best rule's best seed
MAX_LOST_SHARE = 0.01  # a policy that loses more is fast with the others only
RATIOS: Mapping[str, Callable[[ReplayRow], float | None]] = {
    "ttft_mean": lambda row: row.ttft_ms.mean,
    "ttft_p99": lambda row: row.ttft_ms.p99,
    "e2e_mean": lambda row: row.e2e_ms.mean,
    "tpot_p90": lambda row: row.tpot_ms.p90,
    "task_mean": lambda row: figure(TASK).of(row),
}


class RuleFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one policy in a scene, as means over its seeds. Null means that nothing was
    measured.
    """

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
    good_difference: Interval | None = None  # `good` minus the base's, over paired seeds
    more_seeds: dict[str, int | None] = {}  # that would resolve ratio and difference
    task_mean_ms: float | None = None  # of groups; null: the workload has none
    fairness: float | None = None  # likewise, Jain's index of their mean times to first token


class SceneFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one scene; policies are in order of their mean time to first token."""

    name: str
    workload: str
    load: float
    load_unit: str
    base: str | None  # null: the base was not run here
    collapse_ms: float | None  # a seed's mean time to first token above it is collapsed
    rules: tuple[RuleFigures, ...]


def compare_scene(scene: Scene, base: str) -> SceneFigures:
    """Return the figures of all policies, with ratios to `base` if it was run."""
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


class Rivalry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base policy compared with the best of the other policies, which is chosen anew for each
    figure.

    The best other policy is chosen on every second seed and judged on the rest, then the other way
    round: a policy that is best by luck on some draws has no luck on the others.
    """

    scene: str
    ttft_mean_ms: float | None  # of the base
    rivals_ttft: tuple[str, ...]  # the one or two that were chosen
    rival_ttft_ms: float | None
    ttft: Ratio | None  # base by rival
    good: float | None
    rivals_good: tuple[str, ...]
    rival_good: float | None
    points: Interval | None  # base minus rival
    later_p99_ms: float | None  # of continuations; None where no session goes on
    rivals_later: tuple[str, ...]
    rival_later_p99_ms: float | None
    later_p99: Ratio | None  # base by rival
    task_ms: float | None = None  # mean time of groups; None where the workload has none
    rivals_task: tuple[str, ...] = ()
    rival_task_ms: float | None = None
    task: Ratio | None = None  # base by rival


LEAST_SEEDS = 4  # two to choose on, two to judge on


def rivalry(scene: Scene, base: str) -> Rivalry | None:
    """Compare the base policy with the best other one in a scene.

    Returns None if the base has too few seeds, or if no other policy has all of them.
    """
    rows = scene.rows.get(base, {})
    seeds = sorted(rows)
    others = {
        policy: by_seed
        for policy, by_seed in scene.rows.items()
        if policy != base and by_seed.keys() >= rows.keys()
    }
    if len(seeds) < LEAST_SEEDS or not others:
        return None
    own = [rows[seed] for seed in seeds]
    ttft, quick = _rivals(others, seeds, lambda row: row.ttft_ms.mean)
    good, well = _rivals(others, seeds, lambda row: -(row.goodput.share or 0.0))
    later, steady = _rivals(others, seeds, _later_p99_ms)
    task_ms = figure(TASK).of
    task, done = _rivals(others, seeds, task_ms)
    return Rivalry(
        scene=scene.name,
        ttft_mean_ms=_mean(own, lambda row: row.ttft_ms.mean),
        rivals_ttft=quick,
        rival_ttft_ms=_mean(ttft, lambda row: row.ttft_ms.mean),
        ttft=paired_ratio(lambda row: row.ttft_ms.mean, own, ttft),
        good=_mean(own, lambda row: row.goodput.share),
        rivals_good=well,
        rival_good=_mean(good, lambda row: row.goodput.share),
        points=paired(figure(GOOD), own, good),
        later_p99_ms=_mean(own, _later_p99_ms),
        rivals_later=steady,
        rival_later_p99_ms=_mean(later, _later_p99_ms),
        later_p99=paired_ratio(_later_p99_ms, own, later),
        task_ms=_mean(own, task_ms),
        rivals_task=done,
        rival_task_ms=_mean(task, task_ms),
        task=paired_ratio(task_ms, own, task),
    )


def _later_p99_ms(row: ReplayRow) -> float | None:
    return row.continuations.ttft_ms.p99


def _rivals(
    others: Mapping[str, Mapping[int, ReplayRow]],
    seeds: Sequence[int],
    of: Callable[[ReplayRow], float | None],
) -> tuple[list[ReplayRow], tuple[str, ...]]:
    """Return, for each seed, the row of the policy with the least mean of `of` on the other half of
    the seeds. Also return these policies.
    """
    chosen: dict[int, str] = {}
    for here, there in ((seeds[::2], seeds[1::2]), (seeds[1::2], seeds[::2])):
        means = {policy: _mean([rows[s] for s in there], of) for policy, rows in others.items()}
        best = min(means, key=lambda policy: (means[policy] is None, means[policy] or 0.0))
        chosen |= dict.fromkeys(here, best)
    rows = [others[chosen[seed]][seed] for seed in seeds]
    return rows, tuple(dict.fromkeys(chosen[seed] for seed in seeds))


def collapse_line_ms(scene: Scene) -> float | None:
    """Return the mean TTFT, in ms, above which a seed counts as collapsed; None if nothing was
    measured.

    It is `COLLAPSE` times the mean TTFT of the best seed of the policy with the lowest mean.
    Policies that lose requests are left out as long as there is another.
    """
    able = [rows for rows in scene.rows.values() if (lost(list(rows.values())) or 0.0) <= 0.01]
    means = [
        [row.ttft_ms.mean for row in rows.values() if row.ttft_ms.mean is not None]
        for rows in able or scene.rows.values()
    ]
    known = [seeds for seeds in means if seeds]
    return COLLAPSE * min(min(known, key=statistics.fmean)) if known else None


def lost(rows: Sequence[ReplayRow]) -> float | None:
    """Return the share of all requests that were turned away or lost; None if there are no
    requests.
    """
    requests = sum(row.requests for row in rows)
    return sum(row.rejected + row.failed for row in rows) / requests if requests else None


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
    others = [] if base is None else list(base.values())
    ratios = {name: paired_ratio(of, rows, others) for name, of in RATIOS.items()}
    good = paired(figure(GOOD), rows, others)
    return RuleFigures(
        policy=policy,
        seeds=seeds,
        ttft_mean_ms=_mean(rows, lambda row: row.ttft_ms.mean),
        ttft_median_ms=statistics.median(known) if known else None,
        ttft_worst_ms=max(known, default=None),
        ttft_p99_ms=_mean(rows, lambda row: row.ttft_ms.p99),
        new_ttft_ms=_mean(rows, lambda row: row.new_sessions.ttft_ms.mean),
        later_ttft_ms=_mean(rows, lambda row: row.continuations.ttft_ms.mean),
        later_p99_ms=_mean(rows, _later_p99_ms),
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
        ratios=ratios,
        good_difference=good,
        more_seeds={"ttft_mean": more_seeds(ratios["ttft_mean"]), "good": more_seeds(good)},
        task_mean_ms=_mean(rows, figure(TASK).of),
        fairness=_mean(rows, figure(FAIRNESS).of),
    )


def is_collapsed(row: ReplayRow, line_ms: float | None) -> bool:
    """Return True if a seed has collapsed: the mean TTFT is above `line_ms`, or more than
    `MAX_LOST_SHARE` was lost. With so many requests lost, the times of the other requests say
    nothing.
    """
    share, mean = lost([row]), row.ttft_ms.mean
    if share is not None and share > MAX_LOST_SHARE:
        return True
    return mean is not None and line_ms is not None and mean > line_ms


def _mean(rows: Sequence[ReplayRow], of: Callable[[ReplayRow], float | None]) -> float | None:
    found = [value for value in map(of, rows) if value is not None]
    return statistics.fmean(found) if found else None


MAX_TTFT_MS = 2000.0
LEAST_GOOD = 0.9


class Saturation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The load at which one policy saturates.

    `load` is null if the policy kept up with none of the loads, or (`beyond` is set) with all of
    them.
    """

    policy: str
    load: float | None
    beyond: float | None  # the highest load tried, where it kept up with it
    below: float | None  # the lowest one, where it did not keep up with it


class SceneLadder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scenes of ascending load, and the load at which each policy saturates, the best
    policy first.
    """

    name: str
    load_unit: str
    scenes: tuple[str, ...]
    loads: tuple[float, ...]
    rules: tuple[Saturation, ...]


def ladder_of_scenes(name: str, scenes: Sequence[SceneFigures]) -> SceneLadder:
    """Return the load ladder of two or more scenes that differ only by their load."""
    ordered = sorted(scenes, key=lambda scene: scene.load)
    policies = dict.fromkeys(rule.policy for scene in ordered for rule in scene.rules)
    found = [_saturation(policy, ordered) for policy in policies]
    found.sort(key=_rank, reverse=True)
    return SceneLadder(
        name,
        ordered[0].load_unit,
        tuple(scene.name for scene in ordered),
        tuple(scene.load for scene in ordered),
        tuple(found),
    )


def keeps_up(rule: RuleFigures) -> bool:
    """Return True if the policy keeps both limits of a saturated pool: its mean TTFT is short
    enough, and enough answers are good.
    """
    if rule.ttft_mean_ms is None or rule.good is None:
        return False
    return rule.ttft_mean_ms <= MAX_TTFT_MS and rule.good >= LEAST_GOOD


def _saturation(policy: str, scenes: Sequence[SceneFigures]) -> Saturation:
    steps = [
        (scene.load, rule) for scene in scenes for rule in scene.rules if rule.policy == policy
    ]
    before: tuple[float, RuleFigures] | None = None
    for load, rule in steps:
        if not keeps_up(rule):
            if before is None:
                return Saturation(policy, None, None, load)
            return Saturation(policy, _crossing(*before, load, rule), None, None)
        before = load, rule
    return Saturation(policy, None, steps[-1][0], None)


def _crossing(low: float, good: RuleFigures, high: float, bad: RuleFigures) -> float:
    shares = [1.0]
    if good.ttft_mean_ms and bad.ttft_mean_ms and bad.ttft_mean_ms > MAX_TTFT_MS:
        rise = math.log(bad.ttft_mean_ms / good.ttft_mean_ms)
        shares.append(math.log(MAX_TTFT_MS / good.ttft_mean_ms) / rise)
    if good.good is not None and bad.good is not None and bad.good < LEAST_GOOD:
        shares.append((good.good - LEAST_GOOD) / (good.good - bad.good))
    return round(low + (high - low) * min(shares), 6)


def _rank(found: Saturation) -> float:
    if found.beyond is not None:
        return math.inf
    return -math.inf if found.load is None else found.load

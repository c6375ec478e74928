"""Searches, for each policy, the smallest fleet, or the highest rate, at which the targets are
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite, log
from statistics import fmean
from typing import Annotated, Literal

import msgspec
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from simulator.replay.setup import Setup
from simulator.report.figures import NOTHING, Interval, figure, interval, percent, seconds
from simulator.report.page import NOISE
from simulator.report.row import ReplayRow
from simulator.runs.points import PER_GPU, fleet_gpus, points_of
from simulator.runs.runs import RunResults
from simulator.runs.sheet import check_policies, check_setups
from simulator.runs.task import RunOutcome, SweepError

# Every seed must keep the limits, or the bad end of the 95 % interval of their mean.
Rule = Literal["all", "interval"]


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a plan; None means no limit. Shares are of all requests, 0..1."""

    ttft_mean_ms: Annotated[float | None, "longest mean time to first token"] = None
    ttft_p90_ms: Annotated[float | None, "longest 90th percentile of time to first token"] = None
    ttft_p99_ms: Annotated[float | None, "longest 99th percentile of time to first token"] = None
    tpot_mean_ms: Annotated[float | None, "longest mean time per later token, which is the mean "
        "gap between tokens (ITL)"] = None  # fmt: skip
    tpot_p90_ms: Annotated[float | None, "longest 90th percentile of time per later token"] = None
    tpot_p99_ms: Annotated[float | None, "longest 99th percentile of time per later token"] = None
    goodput_share: Annotated[float | None, "smallest share of requests with a good answer (see "
        "below), as 0.99"] = None  # fmt: skip
    max_lost_share: Annotated[float, "largest share of requests that may be rejected or lost; "
        "default 0"
    ] = 0.0  # fmt: skip

    @property
    def has_limits(self) -> bool:
        """True if the targets limit anything besides lost requests."""
        return any(getattr(self, limit.field) is not None for limit in LIMITS[:-1])


@dataclass(frozen=True, slots=True)
class Limit:
    """One kind of target: its field, title and the figure that it limits. Lifetime: process."""

    field: str
    title: str
    of: Callable[[ReplayRow], float | None]
    show: Callable[[float | None], str]
    at_least: bool = False


def _at(path: str) -> Callable[[ReplayRow], float | None]:
    return lambda row: reduce(getattr, path.split("."), row)  # type: ignore[return-value]


def _lost(row: ReplayRow) -> float | None:
    return (row.rejected + row.failed) / row.requests if row.requests else None


def _ms(value: float | None) -> str:
    if value is None or value >= 1000:
        return seconds(value)
    return f"{value:.1f}".removesuffix(".0") + " ms"


LIMITS = (
    Limit("ttft_mean_ms", "TTFT mean", _at("ttft_ms.mean"), _ms),
    Limit("ttft_p90_ms", "TTFT p90", _at("ttft_ms.p90"), _ms),
    Limit("ttft_p99_ms", "TTFT p99", _at("ttft_ms.p99"), _ms),
    Limit("tpot_mean_ms", "TPOT mean", _at("tpot_ms.mean"), _ms),
    Limit("tpot_p90_ms", "TPOT p90", _at("tpot_ms.p90"), _ms),
    Limit("tpot_p99_ms", "TPOT p99", _at("tpot_ms.p99"), _ms),
    Limit("goodput_share", "goodput", _at("goodput.share"), percent, at_least=True),
    Limit("max_lost_share", "lost", _lost, percent),
)


def check_targets(targets: Targets) -> None:
    """Raise `SweepError` for targets that limit nothing, contradict each other, or have invalid
    values.
    """
    problems = []
    for limit in LIMITS:
        value = getattr(targets, limit.field)
        share = limit.field.endswith("_share")
        if value is not None and not (0 <= value <= 1 if share else 0 < value < float("inf")):
            expected = "a share from 0 to 1" if share else "milliseconds above 0"
            problems.append(f"{limit.field}: {value:g}; expected {expected}")
    for of in ("ttft", "tpot"):
        p90_ms, p99_ms = getattr(targets, f"{of}_p90_ms"), getattr(targets, f"{of}_p99_ms")
        if p90_ms is not None and p99_ms is not None and p90_ms > p99_ms:
            problems.append(
                f"{of}_p90_ms {p90_ms:g} and {of}_p99_ms {p99_ms:g} contradict: where 99 of 100 "
                "are within the one, 90 are within the other; give the larger one for p99"
            )
    if not targets.has_limits:
        names = ", ".join(limit.field for limit in LIMITS[:-1])
        problems.append(f"no target: nothing but lost requests is limited; give one of {names}")
    if problems:
        raise SweepError(problems)


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """One limit of the targets, compared with the value that was measured. Lifetime: report."""

    limit: Limit
    bound: float
    value: float | None  # of the worst seed, or the bad end of the interval; None: nothing there
    seed: int | None  # the worst one

    @property
    def met(self) -> bool:
        """True if the value is within the bound; False if there is no value."""
        if self.value is None:
            return False
        return self.value >= self.bound if self.limit.at_least else self.value <= self.bound

    @property
    def reason(self) -> str:
        """The value and the bound, as in `TTFT p90: 2.31 s > 1.00 s (seed 3)`."""
        show = self.limit.show
        if self.value is None:
            return f"{self.limit.title}: no request has one"
        sign = "<" if self.limit.at_least else ">"
        if self.met:
            sign = "≥" if self.limit.at_least else "≤"
        who = "" if self.seed is None else f" (seed {self.seed})"
        value, bound = show(self.value), show(self.bound)
        if value == bound and not self.met:  # by less than the digits shown
            unit = " ms" if self.limit.field.endswith("_ms") else ""
            value, bound = f"{self.value:.8g}{unit}", f"{self.bound:.8g}{unit}"
        return f"{self.limit.title}: {value} {sign} {bound}{who}"

    @property
    def used(self) -> float:
        """The share of the limit that is used: 1 means all of it, and less is better."""
        if self.value is None:
            return float("inf")
        if self.limit.at_least:
            return (1 - self.value) / (1 - self.bound) if self.bound < 1 else 1 - self.value
        return self.value / self.bound if self.bound else self.value


def check_limits(
    targets: Targets, runs: Sequence[tuple[Setup, ReplayRow]], rule: Rule
) -> list[LimitCheck]:
    """Return every limit that `targets` sets, compared with the runs of all seeds."""
    return [
        _check_limit(limit, bound, runs, rule)
        for limit in LIMITS
        if (bound := getattr(targets, limit.field)) is not None
    ]


def _check_limit(
    limit: Limit, bound: float, runs: Sequence[tuple[Setup, ReplayRow]], rule: Rule
) -> LimitCheck:
    values = [(limit.of(row), setup.seed) for setup, row in runs]
    known = [(value, seed) for value, seed in values if value is not None]
    if len(known) < len(values) or not known:
        return LimitCheck(limit, bound, None, None)
    if rule == "interval":
        found = interval([value for value, _ in known])
        assert found is not None
        end = found.low if limit.at_least else found.high
        return LimitCheck(limit, bound, found.mean if end is None else end, None)
    worst = (min if limit.at_least else max)(known, key=lambda pair: pair[0])
    return LimitCheck(limit, bound, worst[0], worst[1] if len(known) > 1 else None)


def shown(targets: Targets) -> Iterator[str]:
    """Yield each target as text."""
    for limit in LIMITS:
        bound = getattr(targets, limit.field)
        if bound is not None:
            yield f"{limit.title} {'≥' if limit.at_least else '≤'} {limit.show(bound)}"


@dataclass(slots=True)
class Found:
    """The result of a search: the number that was found, and all numbers that were tried. Lifetime:
    one search.
    """

    at: int | None = None  # None: not even the highest will do
    outcomes: dict[int, bool] = field(default_factory=dict)
    lucky: list[tuple[int, int]] = field(default_factory=list)  # will do; a higher that will not


def search(start: int, low: int, high: int) -> Generator[int, bool, Found]:
    """Yield numbers of [low, high], receive for each whether it is sufficient, and return what was
    found.

    The answer and its upper neighbour are sufficient, its lower neighbour is not; each is tried
    once. The search takes about 2 log2 of the distance from `start` to the answer, and three more.
    """
    found = Found()
    floor, at = low, min(max(start, low), high)
    while True:
        border = yield from _border(at, floor, high, found)
        if border is None:
            return found
        after = border + 1
        if after > high or (yield from _outcome(after, found)):
            break
        found.lucky.append((border, after))
        floor = at = after + 1
        if floor > high:
            return found
    found.at = border
    below = border - 2
    lucky = below >= low and (yield from _outcome(below, found))
    if lucky and (below, border - 1) not in found.lucky:
        found.lucky.append((below, border - 1))
    return found


def _border(at: int, low: int, high: int, found: Found) -> Generator[int, bool, int | None]:
    """Search a number that is sufficient and lies directly above one that is not, or is `low`.
    Returns None if `high` is not sufficient.
    """
    step = 1
    if (yield from _outcome(at, found)):
        good, bad = at, low - 1
        while good > low:
            lower = max(low, good - step)
            if not (yield from _outcome(lower, found)):
                bad = lower
                break
            good, step = lower, step * 2
    else:
        good, bad = high + 1, at
        while bad < high:
            higher = min(high, bad + step)
            if (yield from _outcome(higher, found)):
                good = higher
                break
            bad, step = higher, step * 2
        if good > high:
            return None
    while good - bad > 1:
        middle = (good + bad) // 2
        if (yield from _outcome(middle, found)):
            good = middle
        else:
            bad = middle
    return good


def _outcome(number: int, found: Found) -> Generator[int, bool, bool]:
    if number not in found.outcomes:
        found.outcomes[number] = yield number
    return found.outcomes[number]


RATE_STEP = 1.05  # rates are found to within five percent
MIN_RATE_PER_S, MAX_RATE_PER_S = 0.01, 10_000.0
FIRST_RATE_PER_WORKER = 1.0  # where the search begins by default: requests per second
DIGITS = 4


class PlanRequest(msgspec.Struct, frozen=True):
    """The question of a plan: the smallest fleet, or the highest rate, at which each policy keeps
    the targets.

    `base` gives the workload and the rest of the set-up; the search starts at its fleet. A search
    for a rate starts at the workload's rate, if it has one.
    """

    base: Setup
    policies: tuple[str, ...]
    targets: Targets
    seeds: tuple[int, ...] = (1, 2, 3)
    find: Literal["workers", "rate"] = "workers"
    most_workers: int = 64
    most_runs: int = 500  # over all policies and seeds
    rule: Rule = "all"


def check_request(request: PlanRequest) -> None:
    """Raise `SweepError` with all that is wrong with the request, before anything runs."""
    check_targets(request.targets)
    check_policies(list(request.policies))
    problems = []
    if not request.policies or len(set(request.policies)) < len(request.policies):
        problems.append("policies: give one or more, each once")
    if not request.seeds or len(set(request.seeds)) < len(request.seeds):
        problems.append("seeds: give one or more, each once")
    if request.rule == "interval" and len(request.seeds) < 2:
        problems.append("seeds: an interval takes two or more")
    if request.most_workers < 1:
        problems.append(f"most_workers: {request.most_workers}; expected 1 or more")
    if request.find == "workers" and len(request.base.groups) != 1:
        problems.append("groups: the number of workers is searched in a fleet of one group")
    if problems:
        raise SweepError(problems)
    ladder = ladder_of(request)
    check_setups([ladder.place(request.base, ladder.start)])


@dataclass(frozen=True, slots=True)
class Ladder:
    """The numbers (rungs) among which a plan searches, which stand for numbers of workers or for
    rates. A larger rung is easier on the fleet. Lifetime: one plan.
    """

    find: Literal["workers", "rate"]
    start: int
    low: int
    high: int

    def value(self, rung: int) -> float:
        """Return the number of workers, or the requests per second, for which a rung stands."""
        if self.find == "workers":
            return rung
        return float(f"{RATE_STEP**-rung:.{DIGITS}g}")

    def named(self, rung: int) -> str:
        """Return the meaning of a rung as text, such as `7 workers` or `12.4 requests/s`."""
        if self.find == "workers":
            return "1 worker" if rung == 1 else f"{rung} workers"
        return f"{self.value(rung):.3g} requests/s"

    def place(self, base: Setup, rung: int) -> Setup:
        """Return the set-up with the number of workers, or the rate, for which a rung stands."""
        if self.find == "workers":
            group = msgspec.structs.replace(base.groups[0], count=rung)
            return msgspec.structs.replace(base, groups=(group,))
        workload = msgspec.structs.replace(base.workload, rate_per_s=self.value(rung), speed=1.0)
        return msgspec.structs.replace(base, workload=workload)


def ladder_of(request: PlanRequest) -> Ladder:
    """Return the ladder of numbers that the plan for a request searches."""
    workers = sum(group.count for group in request.base.groups)
    if request.find == "workers":
        return Ladder("workers", min(workers, request.most_workers), 1, request.most_workers)
    rate = request.base.workload.rate_per_s or FIRST_RATE_PER_WORKER * workers
    low, start, high = (_rung(value) for value in (MAX_RATE_PER_S, rate, MIN_RATE_PER_S))
    return Ladder("rate", start, low, high)


def _rung(rate_per_s: float) -> int:
    return -round(log(rate_per_s) / log(RATE_STEP))


# Shorter runs may end before a growing queue becomes visible.
MIN_SIMULATED_S = 60.0


class Trial(msgspec.Struct, frozen=True):
    """One number of workers, or rate, that was tried with all seeds."""

    value: float  # workers, or requests per second
    met: bool
    reasons: tuple[str, ...]  # of a miss: which limits, by how much; else the tightest limit
    used: float  # of the tightest limit: 1 is all of it


class PlanRow(msgspec.Struct, frozen=True):
    """The answer for one policy: the workers it needs, or the rate it takes."""

    policy: str
    answer: float | None  # workers, or requests per second; null: nothing that was tried will do
    gpus: int | None  # of the fleet at the answer
    used: float | None  # of the tightest limit at the answer
    figures: dict[str, Interval | None]  # at the answer, over seeds
    trials: tuple[Trial, ...]  # hardest first
    notes: tuple[str, ...]  # why not less, what to know


class Tie(msgspec.Struct, frozen=True):
    """A policy that may be behind the best one by chance alone."""

    policy: str
    told: str  # the difference of the two where both were tried


class FleetPlan(msgspec.Struct, frozen=True):
    """The answer to a request; `best` is the policy with the fewest GPUs, or the highest rate.

    Of policies with the same answer, the best one uses the smallest part of its limits; see `ties`.
    """

    request: PlanRequest
    rows: tuple[PlanRow, ...]
    best: str | None
    runs: int
    ties: tuple[Tie, ...] = ()


def plan(request: PlanRequest, runs: RunResults) -> FleetPlan:
    """Search all policies side by side, so that their runs fill the processes.

    Raises `SweepError` for an invalid request, before anything runs.
    """
    check_request(request)
    ladder = ladder_of(request)
    searches = [_PolicySearch(policy, request, ladder) for policy in request.policies]
    count = 0
    while live := [each for each in searches if each.rung is not None]:
        wave = [setup for each in live for setup in each.next_setups()]
        if count + len(wave) > request.most_runs:
            for each in live:
                each.give_up(f"stopped after {count} runs, the limit; raise it to know")
            break
        count += len(wave)
        outcomes = iter(runs.outcomes(wave))
        for each in live:
            each.take_outcomes([next(outcomes) for _ in request.seeds])
    rows = tuple(each.row() for each in searches)
    best = _best(request, rows)
    return FleetPlan(request, rows, best, count, tuple(_ties(request, searches, best)))


class _PolicySearch:
    """The search of one policy for its number of workers or its rate. Lifetime: one plan."""

    def __init__(self, policy: str, request: PlanRequest, ladder: Ladder) -> None:
        self.policy, self._request, self._ladder = policy, request, ladder
        self._trials: dict[int, Trial] = {}
        self._outcomes: dict[int, Sequence[RunOutcome]] = {}
        self.pairs: dict[int, list[tuple[Setup, ReplayRow]]] = {}  # by what was tried
        self._notes: list[str] = []
        self._found = Found()
        self._search: Generator[int, bool, Found] = search(ladder.start, ladder.low, ladder.high)
        self.rung: int | None = next(self._search)

    def next_setups(self) -> list[Setup]:
        """Return the set-ups that the search needs next, one for each seed."""
        assert self.rung is not None
        placed = self._ladder.place(self._request.base, self.rung)
        return [
            msgspec.structs.replace(placed, policy=self.policy, seed=seed)
            for seed in self._request.seeds
        ]

    def take_outcomes(self, outcomes: Sequence[RunOutcome]) -> None:
        """Take the outcomes of the wanted set-ups, and choose the next number to try."""
        assert self.rung is not None
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            self.give_up(f"{self._ladder.named(self.rung)}: {errors[0]}")
            return
        pairs = [(o.task.setup, o.row) for o in outcomes if o.row is not None]
        trial = self._judge(self.rung, pairs)
        self._trials[self.rung], self._outcomes[self.rung] = trial, outcomes
        self.pairs[self.rung] = pairs
        try:
            self.rung = self._search.send(trial.met)
        except StopIteration as stop:
            self.rung, self._found = None, stop.value

    @property
    def at(self) -> int | None:
        """The rung that the search has found; None if it found none."""
        return self._found.at

    def give_up(self, why: str) -> None:
        """End the search without an answer, for the reason `why`."""
        self._notes.append(why)
        self.rung = None

    def row(self) -> PlanRow:
        """Return the row of this policy in the plan."""
        at, ladder = self._found.at, self._ladder
        trials = tuple(self._trials[rung] for rung in sorted(self._trials))
        if at is None:
            return PlanRow(self.policy, None, None, None, {}, trials, tuple(self._no_answer()))
        point = points_of(self._outcomes[at])[0]
        return PlanRow(
            self.policy,
            ladder.value(at),
            fleet_gpus(ladder.place(self._request.base, at)),
            self._trials[at].used,
            dict(point.figures),
            trials,
            tuple(self._notes_on(at, point.rows)),
        )

    def _judge(self, rung: int, pairs: Sequence[tuple[Setup, ReplayRow]]) -> Trial:
        limits = check_limits(self._request.targets, pairs, self._request.rule)
        misses = tuple(limit.reason for limit in limits if not limit.met)
        tightest = max(limits, key=lambda limit: limit.used)
        return Trial(
            self._ladder.value(rung),
            not misses,
            misses or (tightest.reason,),
            round(min(tightest.used, 1e9), 4),
        )

    def _notes_on(self, at: int, rows: Sequence[ReplayRow]) -> list[str]:
        ladder = self._ladder
        if at - 1 in self._trials:
            notes = [f"{_missing(ladder.named(at - 1))} {'; '.join(self._trials[at - 1].reasons)}"]
        else:
            notes = [f"{ladder.named(at)} is the end of what was searched"]
        notes += self._lucky_notes()
        shortest_s = min(row.simulated_s for row in rows)
        if shortest_s < MIN_SIMULATED_S:
            notes.append(
                f"runs of {shortest_s:.0f} s only: a queue may grow for longer; give a longer "
                "workload"
            )
        return notes

    def _lucky_notes(self) -> list[str]:
        named = self._ladder.named
        return [
            f"{named(good)} kept the targets, but {named(bad)} missed "
            f"{'; '.join(self._trials[bad].reasons)}: taken for luck, more seeds would tell"
            for good, bad in self._found.lucky
        ]

    def _no_answer(self) -> list[str]:
        easiest = max(self._trials, default=None)
        if self._notes or easiest is None:
            return self._notes
        reasons = "; ".join(self._trials[easiest].reasons)
        return [f"even {_missing(self._ladder.named(easiest))} {reasons}", *self._lucky_notes()]


def _best(request: PlanRequest, rows: Sequence[PlanRow]) -> str | None:
    """Return the policy with the fewest GPUs, or with the highest rate.

    Of policies with equal answers, it is the one that uses the smallest part of its limits.
    """
    sign = 1 if request.find == "workers" else -1
    able = [
        (sign * row.answer, row.used, row.policy)
        for row in rows
        if row.answer is not None and row.used is not None
    ]
    return min(able)[2] if able else None


# Of a limit: what is closer than a rate is told is level, whatever the seeds say, and what is
# further apart than this is not, however few or wild they are.
LEVEL, APART = 0.05, 0.25


def _ties(
    request: PlanRequest, searches: Sequence[_PolicySearch], best: str | None
) -> Iterator[Tie]:
    """Yield the policies that cannot be told apart from the best one at its answer, whatever their
    own answers are.
    """
    winner = next((each for each in searches if each.policy == best), None)
    if winner is None or winner.at is None:
        return
    for each in searches:
        if each is winner or each.at is None or winner.at not in each.pairs:
            continue
        told = _level(request.targets, winner.pairs[winner.at], each.pairs[winner.at])
        if told is not None:
            named = ladder_of(request).named(winner.at)
            yield Tie(each.policy, f"with {named}, {told}")


def _level(
    targets: Targets,
    runs: Sequence[tuple[Setup, ReplayRow]],
    others: Sequence[tuple[Setup, ReplayRow]],
) -> str | None:
    """Return a text with the figures by which two policies cannot be told apart, or None if they
    can.

    Both ran with the same seeds on one fleet. They count as level if the deciding limits (the
    tightest of each, and those missed) differ by less than the seeds do and by at most `APART` of
    the limit, or by at most `LEVEL` of it.
    """
    told = []
    sides = [check_limits(targets, side, "all") for side in (runs, others)]
    tightest = {max(side, key=lambda one: one.used).limit.field for side in sides}
    for mine, theirs in zip(*sides, strict=True):
        limit, bound = mine.limit, mine.bound
        if limit.field not in tightest and mine.met and theirs.met:
            continue
        used = [[LimitCheck(limit, bound, limit.of(row), None).used for _, row in side]
                for side in (runs, others)]  # fmt: skip
        if not all(map(isfinite, (*used[0], *used[1]))):
            return None
        apart = interval([b - a for a, b in zip(*used, strict=True)])
        assert apart is not None
        level = 0.0 if bound == limit.at_least else LEVEL  # a bound of 0 allows no share of it
        chance = apart.half is not None and not apart.excludes_zero()
        if abs(apart.mean) > (APART if chance else level):
            return None
        values = [fmean(limit.of(row) or 0.0 for _, row in side) for side in (others, runs)]
        half = "" if apart.half is None else f" ± {apart.half * 100:.1f}"
        told.append(
            f"{limit.title}: {limit.show(values[0])} against {limit.show(values[1])}, "
            f"{apart.mean * 100:+.1f}{half} points of the limit"
        )
    return "; ".join(told)


def _missing(named: str) -> str:
    """Return the beginning of a reason, such as `7 workers miss` or `1 worker misses`."""
    return f"{named} {'misses' if named == '1 worker' else 'miss'}"


SHOWN = (figure("ttft_ms.p90"), figure("tpot_ms.mean"), figure("hit_rate_tokens"), PER_GPU)


def plan_table(plan: FleetPlan) -> Table:
    """Return a table with a line for each policy, the best one marked."""
    rate = plan.request.find == "rate"
    table = Table(
        title=f"Targets: {', '.join(shown(plan.request.targets))}",
        title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("policy", overflow="fold")
    table.add_column("requests/s" if rate else "workers", justify="right", no_wrap=True)
    table.add_column("GPUs", justify="right", no_wrap=True)
    for one in SHOWN:
        table.add_column(one.title, justify="right", no_wrap=True)
    table.add_column("used", justify="right", no_wrap=True)
    marked = [] if plan.best is None else _level_with_best(plan)
    for row in plan.rows:
        table.add_row(*_cells(row), style="bold" if row.policy in marked else "")
    return table


def plan_lines(plan: FleetPlan) -> Iterator[str]:
    """Yield the recommendation as rich markup, then for each policy the reason why less is not
    enough, and notes.
    """
    yield escape(verdict(plan))
    for tie in plan.ties:
        yield f"[bold]{escape(tie.policy)}[/] beside {escape(plan.best or '')} {escape(tie.told)}"
    for row in plan.rows:
        for note in row.notes:
            yield f"[bold]{escape(row.policy)}[/]: {escape(note)}"


def verdict(plan: FleetPlan) -> str:
    """Return the answer of the plan in one sentence."""
    rows = {row.policy: row for row in plan.rows}
    if plan.best is None:
        return "No policy keeps the targets with anything that was tried."
    best, level = rows[plan.best], _level_with_best(plan)
    others = [row for row in plan.rows if row.policy not in level]
    told = ", ".join(f"{row.policy} {_amount(plan, row)}{_beside(plan, row)}" for row in others)
    told += f" ({NOISE} equal to {plan.best} within noise)" if f" {NOISE}" in told else ""
    equal = ", which are equal within noise" if len(level) > 1 else ""
    if plan.request.find == "workers":
        head = f"Take {' or '.join(level)}{equal}, on" if equal else f"Take {plan.best} on"
        head += f" {_amount(plan, best)} ({best.gpus} GPUs)"
        return f"{head}; the others need: {told}." if told else f"{head}."
    takes = f"{' and '.join(level)}{equal}, take" if equal else f"{plan.best} takes"
    head = f"{takes} {_amount(plan, best)} on {best.gpus} GPUs"
    return f"{head}; the others take: {told}." if told else f"{head}."


def _level_with_best(plan: FleetPlan) -> list[str]:
    """Return the best policy, and the policies with the same answer that cannot be told apart from
    it.
    """
    answers = {row.policy: row.answer for row in plan.rows}
    ties = [tie.policy for tie in plan.ties if answers[tie.policy] == answers[plan.best or ""]]
    return [plan.best or "", *ties]


def _beside(plan: FleetPlan, row: PlanRow) -> str:
    """Return the note behind a policy's answer in the table: the mark of noise, or how much less
    reserve it leaves than the best policy.
    """
    best = next(one for one in plan.rows if one.policy == plan.best)
    if any(tie.policy == row.policy for tie in plan.ties):
        return f" {NOISE}"
    if row.answer == best.answer:
        return f" with less room ({percent(row.used)} of a limit used, not {percent(best.used)})"
    return ""


def as_json(plan: FleetPlan) -> bytes:
    """Return the plan as JSON, including every trial."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def _amount(plan: FleetPlan, row: PlanRow) -> str:
    if row.answer is None:
        return "(no answer)"
    if plan.request.find == "rate":
        return f"{row.answer:.3g} requests/s"
    return f"{row.answer:g} worker{'' if row.answer == 1 else 's'}"


def _cells(row: PlanRow) -> list[str]:
    if row.answer is None:
        return [escape(row.policy), *[NOTHING] * (len(SHOWN) + 3)]
    means = (row.figures.get(one.name) for one in SHOWN)
    figures = [
        one.show(None if found is None else found.mean)
        for one, found in zip(SHOWN, means, strict=True)
    ]
    return [escape(row.policy), f"{row.answer:.3g}", str(row.gpus), *figures, percent(row.used)]

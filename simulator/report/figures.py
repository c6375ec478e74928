"""The figures by which policies are compared, with means and intervals over seeds."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from simulator.report.page import NOISE, NOT_RESOLVED, WIDE, Table
from simulator.report.row import ReplayRow

NOTHING = "–"
SHORT_MS = 100.0


def whole(value: float | None) -> str:
    """Return a count or milliseconds as text without decimals."""
    return NOTHING if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """Return a share (0 to 1) as text in percent."""
    return NOTHING if value is None else f"{value:.1%}"


def ratio(value: float | None) -> str:
    """Return a ratio as text with two decimals."""
    return NOTHING if value is None else f"{value:.2f}"


def fine(value: float | None) -> str:
    """Return a ratio as text with three decimals."""
    return NOTHING if value is None else f"{value:.3f}"


def seconds(value_ms: float | None) -> str:
    """Return milliseconds as text in seconds; short times stay in milliseconds, because two
    decimals of a second would not show them.
    """
    if value_ms is None:
        return NOTHING
    return f"{value_ms:.0f} ms" if value_ms < SHORT_MS else f"{value_ms / 1000:.2f} s"


def counted(count: int, what: str) -> str:
    """Return a count with its noun, as in `1 request` and `2,000 requests`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


FINE_MS = 100.0

Better = Literal["lower", "higher"]
_LIGHT = "at light load a high value says little, since few workers have work"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a report: where its value is in a row, its title, and which direction is
    better.

    Lifetime: process.
    """

    name: str  # its place in the JSON report: "ttft_ms.p90"
    title: str
    better: Better
    show: Callable[[float | None], str]
    meaning: str
    unit: str = ""
    only: str = ""  # path of a flag: rows without the flag do not show the figure

    def of(self, row: Any) -> float | None:
        """Return the figure's value in a row of results, or None if it was not measured."""
        if self.only and not _found(row, self.only):
            return None
        value: float | None = _found(row, self.name)
        return value

    def lead(self, value: float, other: float) -> float:
        """Return the amount by which `value` is better than `other`; it is below 0 if `value` is
        worse.
        """
        return other - value if self.better == "lower" else value - other

    def with_unit(self, value: float | None) -> str:
        """Return a value of this figure as text with its unit, for a sentence."""
        return f"{self.show(value)} {self.unit}".rstrip()


def _found(row: Any, name: str) -> Any:
    for part in name.split("."):
        row = getattr(row, part)
    return row


def ms(value: float | None) -> str:
    """Return milliseconds as text; small values get a decimal, because whole numbers would hide
    differences.
    """
    return whole(value) if value is None or value >= FINE_MS else f"{value:.1f}"


FIGURES = (
    Figure("ttft_ms.mean", "TTFT", "lower", ms, "mean time to first token", "ms"),
    Figure("ttft_ms.p90", "TTFT p90", "lower", ms, "nine of ten first tokens came within", "ms"),
    Figure("ttft_ms.p99", "TTFT p99", "lower", ms, "99 of 100 first tokens came within", "ms"),
    Figure("tpot_ms.mean", "TPOT", "lower", ms, "mean time per later token of an answer", "ms"),
    Figure("tpot_ms.p90", "TPOT p90", "lower", ms, "nine of ten answers were that quick", "ms"),
    Figure("tpot_ms.p99", "TPOT p99", "lower", ms, "99 of 100 answers were that quick", "ms"),
    Figure("e2e_ms.mean", "e2e", "lower", ms, "mean time to the last token", "ms"),
    Figure("e2e_ms.p99", "e2e p99", "lower", ms, "99 of 100 last tokens came within", "ms"),
    Figure(
        "continuations.ttft_ms.mean",
        "later TTFT",
        "lower",
        ms,
        "mean time to first token of a session's second and later requests",
        "ms",
    ),
    Figure(
        "continuations.ttft_ms.p99",
        "later p99",
        "lower",
        ms,
        "99 of 100 of these came within",
        "ms",
    ),
    Figure(
        "waits.max_ms", "held", "lower", ms, "longest wait at the router before a dispatch", "ms"
    ),
    *(
        Figure(f"tasks.time_ms.{name}", title, "lower", ms, meaning, "ms", "tasks.grouped")
        for name, title, meaning in (
            ("mean", "task", "mean time of a task: a main agent and its sub-agents, to its end"),
            ("p50", "task p50", "half of the tasks took no longer"),
            ("p90", "task p90", "nine of ten tasks took no longer"),
            ("p99", "task p99", "99 of 100 tasks took no longer"),
        )
    ),
    Figure(
        "tasks.fairness",
        "Jain",
        "higher",
        fine,
        "Jain's fairness index of the tasks' mean times to first token; 1: all wait alike",
        only="tasks.grouped",
    ),
    Figure("hit_rate_tokens", "hits", "higher", percent, "prompt tokens found in the cache"),
    Figure(
        "host_hit_rate_tokens", "of host", "lower", percent, "of these, loaded from host memory"
    ),
    Figure("output_tokens_per_s", "tok/s", "higher", whole, "answers of all workers", "tokens/s"),
    Figure(
        *("goodput.share", "good", "higher", percent),
        "requests within both limits: of the first token, and of the mean time per later token",
    ),
    Figure(
        *("load_skew_busy", "max/mean", "lower", ratio),
        f"imbalance: the busiest worker's busy time over the workers' mean; {_LIGHT}",
    ),
    Figure("rejected", "rej.", "lower", whole, "requests turned away"),
    Figure("failed", "lost", "lower", whole, "requests lost after their first token"),
)


# Figures of live runs (`simulator.live.outcome.ResultRow`) that replays do not have.
LIVE_FIGURES = (
    *FIGURES[:3],
    Figure("hit_rate_tokens", "hits", "higher", percent, "prompt tokens found in the cache"),
    Figure(
        *("load_skew", "max/mean", "lower", ratio),
        f"imbalance: the busiest worker's requests over the workers' mean; {_LIGHT}",
    ),
    Figure("good_share", "good", "higher", percent, "TTFT within 2 s, 50 ms a token, of all"),
    Figure("new_ttft_ms.mean", "first TTFT", "lower", ms, "of requests that begin a session", "ms"),
    Figure("continuation_ttft_ms.mean", "later TTFT", "lower", ms, "of the others", "ms"),
    Figure("itl_ms.mean", "TPOT", "lower", ms, "mean time per later token of an answer", "ms"),
    Figure("e2e_ms.mean", "e2e", "lower", ms, "mean time to the last token", "ms"),
    Figure("output_tokens_per_s", "tok/s", "higher", whole, "answers of all workers", "tokens/s"),
    Figure("rejected", "rej.", "lower", whole, "requests turned away"),
    Figure("failed", "lost", "lower", whole, "requests without a whole answer"),
    Figure(
        "overrun_steps_share", "late", "lower", percent,
        "steps of timed workers that ended late because this machine was busy",
    ),
)  # fmt: skip


TTFT, GOOD = "ttft_ms.mean", "goodput.share"  # the figures that policies are compared by
TASK, FAIRNESS = "tasks.time_ms.mean", "tasks.fairness"  # of workloads with groups


def meaning_of(one: Figure, rows: Sequence[ReplayRow]) -> str:
    """Return what a figure of these replays means; the text on goodput has the two limits."""
    if one.name != GOOD or not rows:
        return one.meaning
    limits = rows[0].goodput
    return (
        f"requests within both limits: first token {limits.ttft_ms:g} ms (--good-ttft-ms), "
        f"each later token {limits.tpot_ms:g} ms in the mean (--good-tpot-ms)"
    )


def figure(name: str) -> Figure:
    """Return the figure called `name`. Raises `KeyError`, which lists the valid names, if there is
    none.
    """
    for one in FIGURES:
        if one.name == name:
            return one
    raise KeyError(f"{name!r} is no figure; there are {', '.join(f.name for f in FIGURES)}")


# What is wider says nothing and is not printed: a ratio or a time whose interval cannot tell half
# from double, and a share that may be any in a range of fifty points.
WIDEST_FACTOR = 4.0  # upper end by lower end
WIDEST_SHARE = 0.5  # upper end minus lower end


def mean_text(one: Figure, value: Interval | None) -> str:
    """Return a mean as text, with half of its 95 % interval after ± if there are several seeds."""
    if value is None:
        return NOTHING
    mean = one.show(value.mean)
    if not value.half:
        return mean
    return f"{mean} ±{one.show(value.half)}" if mean_resolved(one, value) else f"{mean} {WIDE}"


def mean_resolved(one: Figure, value: Interval) -> bool:
    """Return True if the interval of a mean is narrow enough for the mean to be meaningful."""
    if value.low is None or value.high is None:
        return True
    if one.show is percent:
        return value.high - value.low <= WIDEST_SHARE
    return value.high <= WIDEST_FACTOR * value.low


def marks(cells: Iterable[str], more: str) -> str:
    """Return the explanation of those marks (such as `~`) that occur in `cells`; "" if none occurs.
    `more` says how a reader can get more seeds.
    """
    text = "\n".join(cells)
    said = (
        f"{NOISE} within noise: the 95 % interval includes no difference." if NOISE in text else ""
    )
    wide = [mark for mark in (NOT_RESOLVED, WIDE) if mark in text]
    if not wide:
        return said
    return (
        f"{said} {', '.join(wide)}: too few seeds; the interval's upper end is more than "
        f"{WIDEST_FACTOR:g} times the lower one, or {100 * WIDEST_SHARE:g} points above it. More "
        f"seeds narrow it: {more}."
    ).strip()


def figure_table(
    rows: Mapping[str, Mapping[str, Interval | None]],
    figures: Sequence[Figure],
    best: Mapping[str, str] | None = None,
    strong: Collection[str] = (),
    head: str = "policy",
    summary: str = "",
) -> Table:
    """Return a table with one line for each label of `rows` and one column for each figure.

    `best` maps the name of a figure to the label whose cell is marked.
    """
    marks = best or {}
    return Table(
        (head, *(one.title for one in figures)),
        [
            (label, *(mean_text(one, row[one.name]) for one in figures))
            for label, row in rows.items()
        ],
        frozenset(
            (line, column)
            for line, label in enumerate(rows)
            for column, one in enumerate(figures, 1)
            if marks.get(one.name) == label
        ),
        frozenset(line for line, label in enumerate(rows) if label in strong),
        summary=summary,
    )


def live_table(rows: Mapping[str, Any], strong: Collection[str] = ()) -> tuple[Table, list[Figure]]:
    """Return the table of live runs by label, and the figures that were measured in any of them."""
    figures = [one for one in LIVE_FIGURES if any(one.of(row) is not None for row in rows.values())]
    measured = {
        label: {
            one.name: None if (value := one.of(row)) is None else interval([value])
            for one in figures
        }
        for label, row in rows.items()
    }
    return figure_table(measured, figures, strong=strong), figures


def labels(rows: Sequence[ReplayRow]) -> list[str]:
    """Return the label of each row's policy: its name, and the parameters in which it differs from
    other policies of that name.
    """
    return [_label(row, [other for other in rows if other.policy == row.policy]) for row in rows]


def _label(row: ReplayRow, namesakes: Sequence[ReplayRow]) -> str:
    names = dict.fromkeys(name for other in namesakes for name in other.params)
    telling = [
        name
        for name in names
        if any(other.params.get(name) != row.params.get(name) for other in namesakes)
    ]
    inner, *wrappers = row.policy.split("|")
    told: dict[str, list[str]] = {part: [] for part in ("", *wrappers)}
    for name in telling:
        if name in row.params:  # "epsilon", or "bounded_load.epsilon" of a wrapper
            wrapper, _, key = name.rpartition(".")
            told[wrapper].append(f"{key}={_plain(row.params[name])}")
    parts = ((wrapper or inner, "&".join(of)) for wrapper, of in told.items())
    return "|".join(f"{part}?{pairs}" if pairs else part for part, pairs in parts)


def _plain(value: bool | int | float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


DIGITS = 6
# 97.5 % quantiles of Student's t for 1, 2, ... 30 degrees of freedom.
STUDENT_T = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157,
    2.228139, 2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922,
    2.093024, 2.085963, 2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831,
    2.048407, 2.045230, 2.042272,
)  # fmt: skip
NORMAL = 1.959963985  # 97.5 % quantile of the normal distribution


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mean over seeds and its 95 % interval; `low` and `high` are null for a single seed."""

    mean: float
    low: float | None
    high: float | None
    seeds: int  # that had a value

    @property
    def half(self) -> float | None:
        """Half of the interval's width, which tables show after ±; None for a single seed."""
        return None if self.high is None else self.high - self.mean

    def excludes_zero(self) -> bool:
        """Return True if the interval does not include 0; False for a single seed."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Aggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one policy over all its seeds, keyed by the names in `figures.FIGURES`.

    A null value means that the figure was never measured.
    """

    label: str  # the policy, with the parameters that tell it from others of its name
    policy: str
    params: dict[str, bool | int | float | str]
    seeds: tuple[int, ...]
    figures: dict[str, Interval | None]
    versus: str | None  # label of the first policy; null for itself
    differences: dict[str, Interval | None]  # this one minus the first, over the seeds both have
    ratios: dict[str, Ratio | None] = {}  # of times: this one over the first, over the same seeds
    more_seeds: dict[str, int | None] = {}  # that would resolve TTFT's ratio, good's difference


def aggregate(rows: Sequence[ReplayRow]) -> tuple[Aggregate, ...]:
    """Return one `Aggregate` for each policy with its parameters, in the order of their first rows.

    Raises `ValueError` if a policy has two rows of one seed.
    """
    groups = by_policy(rows)
    first = next(iter(groups.values()), [])
    return tuple(_aggregate(label, own, next(iter(groups)), first) for label, own in groups.items())


def _aggregate(
    label: str, rows: Sequence[ReplayRow], versus: str, others: Sequence[ReplayRow]
) -> Aggregate:
    found = Aggregate(
        label=label,
        policy=rows[0].policy,
        params=rows[0].params,
        seeds=tuple(row.seed for row in rows),
        figures={f.name: interval(values(f, rows)) for f in FIGURES},
        versus=None,
        differences={},
    )
    if label == versus:
        return found
    differences = {f.name: paired(f, rows, others) for f in FIGURES}
    ratios = {f.name: paired_ratio(f.of, rows, others) for f in FIGURES if f.unit == "ms"}
    return msgspec.structs.replace(
        found,
        versus=versus,
        differences=differences,
        ratios=ratios,
        more_seeds={
            TTFT: more_seeds(ratios[TTFT]),
            GOOD: more_seeds(differences[GOOD]),
        },
    )


def by_policy(rows: Sequence[ReplayRow]) -> dict[str, list[ReplayRow]]:
    """Return the rows of each policy by its label, in the order of their first rows.

    Raises `ValueError` if a policy has two rows of one seed.
    """
    groups: dict[str, list[ReplayRow]] = {}
    for row, label in zip(rows, labels(rows), strict=True):
        own = groups.setdefault(label, [])
        if any(other.seed == row.seed for other in own):
            raise ValueError(f"{label} has two rows of seed {row.seed}; give each seed once")
        own.append(row)
    return groups


def values(figure: Figure, rows: Sequence[ReplayRow]) -> list[float]:
    """Return the value of the figure in each row that has one."""
    return [value for value in map(figure.of, rows) if value is not None]


def paired(
    figure: Figure, rows: Sequence[ReplayRow], others: Sequence[ReplayRow]
) -> Interval | None:
    """Return mean and interval of the figure in `rows` minus `others`, paired by seed.

    Returns None if the two have no seed in common.
    """
    there = {row.seed: figure.of(row) for row in others}
    pairs = [(figure.of(row), there.get(row.seed)) for row in rows]
    return interval([a - b for a, b in pairs if a is not None and b is not None])


def interval(sample: Sequence[float]) -> Interval | None:
    """Return mean and 95 % interval (Student's t) of independent values, or None if there
    are none.
    """
    count = len(sample)
    if not count:
        return None
    mean = statistics.fmean(sample)
    if count == 1:
        return Interval(round(mean, DIGITS), None, None, 1)
    # statistics.stdev works with exact fractions: its last digit does not depend on the order.
    half = student_t(count - 1) * statistics.stdev(sample) / math.sqrt(count)
    return Interval(
        round(mean, DIGITS), round(mean - half, DIGITS), round(mean + half, DIGITS), count
    )


class Ratio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The geometric mean of ratios over paired seeds, with its 95 % interval.

    `low` and `high` are null for a single seed.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int


def paired_ratio(
    of: Callable[[ReplayRow], float | None],
    rows: Sequence[ReplayRow],
    others: Sequence[ReplayRow],
) -> Ratio | None:
    """Return the geometric mean and interval of `rows` divided by `others`, paired by seed. `of`
    returns the compared value of a row. Seeds for which one of the two values is not above 0 are
    left out. Returns None if no seed is left.
    """
    there = {row.seed: of(row) for row in others}
    pairs = [(of(row), there.get(row.seed)) for row in sorted(rows, key=lambda row: row.seed)]
    return ratio_of_pairs([(own or 0.0, other or 0.0) for own, other in pairs])


def ratio_of_pairs(pairs: Sequence[tuple[float, float]]) -> Ratio | None:
    """Return the geometric mean of own value over other value, with its interval, over pairs of
    (own value, other value), all above 0. Returns None if there are no pairs.
    """
    logs = [math.log(own / other) for own, other in pairs if own > 0 and other > 0]
    if not logs:
        return None
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(_factor(mean), None, None, 1)
    half = student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(_factor(mean), _factor(mean - half), _factor(mean + half), len(logs))


def _factor(logarithm: float) -> float:
    """Return the ratio that has this logarithm, rounded to six digits. The interval of two seeds
    may be too wide for a float.
    """
    return float(f"{math.exp(min(max(logarithm, -700.0), 700.0)):.6g}")


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with `freedom` >= 1 degrees of freedom, to five
    digits.

    Values beyond the table come from the expansion around the normal quantile in Abramowitz and
    Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5.
    """
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / float(freedom) ** n for n, term in enumerate(terms, 1))


RESOLVED = 0.03  # width of an interval: of a ratio's own mean, or of all requests
MAX_SEEDS = 1_000_000  # largest number that is shown


def more_seeds(found: Ratio | Interval | None) -> int | None:
    """Return about how many more seeds would narrow the interval to `RESOLVED`. 0 means that it is
    narrow enough already; None means that there is only one seed, from which nothing can be
    estimated. The estimate uses the spread between the seeds so far: the width falls with the root
    of their number, and with Student's t.
    """
    if found is None or found.low is None or found.high is None:
        return None
    if isinstance(found, Ratio):
        half, wanted = math.log(found.high / found.low) / 2, math.asinh(RESOLVED / 2)
    else:
        half, wanted = (found.high - found.low) / 2, RESOLVED / 2
    if half <= wanted:
        return 0
    spread = half * math.sqrt(found.seeds) / student_t(found.seeds - 1)
    enough = bisect_left(
        range(found.seeds, MAX_SEEDS),
        True,
        key=lambda count: student_t(count - 1) * spread / math.sqrt(count) <= wanted,
    )
    return max(1, enough)


def ratio_text(found: Ratio | None) -> str:
    """Return a ratio and its interval as text, marked as noise if the interval includes 1."""
    if found is None:
        return NOTHING
    mean, low, high = found.mean, found.low, found.high
    if low is None or high is None:
        return f"{mean:.2f}"
    if not low <= 1 <= high or low == high:
        return f"{mean:.2f} [{low:.2f}, {high:.2f}]"
    if high > WIDEST_FACTOR * low:
        return f"{mean:.2f} {NOT_RESOLVED}"
    return f"{mean:.2f} [{low:.2f}, {high:.2f}] {NOISE}"


def points_text(found: Interval | None) -> str:
    """Return a difference of shares and its interval as text, in percentage points.

    It is marked as noise if the interval includes 0.
    """
    if found is None:
        return NOTHING
    if found.low is None or found.high is None:
        return f"{100 * found.mean:+.1f}"
    mean, low, high = 100 * found.mean, 100 * found.low, 100 * found.high
    if not low <= 0 <= high or low == high:
        return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
    if high - low > 100 * WIDEST_SHARE:
        return f"{mean:+.1f} {NOT_RESOLVED}"
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}] {NOISE}"


def difference_text(found: Ratio | Interval | None) -> str:
    """Return a ratio, or a difference of shares, as text."""
    return points_text(found) if isinstance(found, Interval) else ratio_text(found)


MOST_NAMED = 6


def seeds_needed(named: Mapping[str, Ratio | Interval | None]) -> str:
    """Return a sentence on how many more seeds would narrow the named intervals to `RESOLVED`.

    Returns "" if no interval needs more seeds.
    """
    more = {name: count for name, found in named.items() if (count := more_seeds(found))}
    if not more:
        return ""
    ranked = sorted(more, key=more.__getitem__, reverse=True)
    told = [f"{name} {_about(more[name])}" for name in ranked[:MOST_NAMED]]
    if len(ranked) > MOST_NAMED:
        told.append(f"the {len(ranked) - MOST_NAMED} others fewer")
    return f"More seeds that narrow an interval to {100 * RESOLVED:g} %: about {', '.join(told)}."


# By label: mean TTFT over that of the rule that it stands beside, and the difference of the shares
# of good answers, both paired by seed.
Beside = Mapping[str, tuple[Ratio | None, Interval | None]]


def beside_table(versus: str, found: Beside) -> tuple[str, Table, str] | None:
    """Return the heading, the table, and a sentence on wanted seeds, for a comparison of policies
    with the policy `versus`. Returns None if there is nothing to compare, or only one seed.
    """
    seeds = max((part.seeds for parts in found.values() for part in parts if part), default=0)
    if seeds < 2:
        return None
    cells = [(label, ratio_text(ttft), points_text(good)) for label, (ttft, good) in found.items()]
    head = (f"beside {versus}", "TTFT ratio", "good, points")
    title = f"the same {seeds} seeds, paired with {versus}; 95 % intervals"
    return title, Table(head, cells), seeds_needed(named_parts(found))


def named_parts(found: Beside) -> dict[str, Ratio | Interval | None]:
    """Return the intervals of a comparison under the names that `seeds_needed` prints."""
    return {
        f"{label} {name}": part
        for label, parts in found.items()
        for name, part in zip(("TTFT", "good"), parts, strict=True)
    }


def _about(count: int) -> str:
    """Return an estimated count as text, rounded to two digits."""
    return f"{float(f'{count:.2g}'):,.0f}"


Groups = Mapping[str, Sequence[ReplayRow]]  # `aggregate.by_policy`


@dataclass(frozen=True, slots=True)
class Lead:
    """How far the best policy by one figure is ahead of the next best one. Lifetime: process."""

    figure: Figure
    winner: str
    value: float  # mean over the winner's seeds
    second: str
    other: float  # mean over the second's seeds
    difference: Interval | None  # winner minus second, seed by seed; None: no common seed

    @property
    def is_significant(self) -> bool | None:
        """True if the lead is larger than the noise between seeds; None if there is only
        one seed.
        """
        if self.difference is None or self.difference.low is None:
            return None
        return self.difference.excludes_zero()

    @property
    def spreads(self) -> float | None:
        """The lead divided by half of its 95 % interval; None if that interval is missing or 0
        wide.
        """
        half = self.difference.half if self.difference else None
        return abs(self.difference.mean) / half if self.difference and half else None


def means(figure: Figure, groups: Groups) -> dict[str, float]:
    """Return the mean over seeds of each label that has the figure, the best label first."""
    told = {label: values(figure, rows) for label, rows in groups.items()}
    found = {label: statistics.fmean(sample) for label, sample in told.items() if sample}
    ordered = sorted(found, key=found.__getitem__, reverse=figure.better == "higher")
    return {label: found[label] for label in ordered}


def lead(figure: Figure, groups: Groups) -> Lead | None:
    """Return how far the best policy by `figure` is ahead of the next one. Returns None if fewer
    than two policies have the figure, or if the best two are equal.
    """
    ranked = list(means(figure, groups).items())
    if len(ranked) < 2 or ranked[0][1] == ranked[1][1]:
        return None
    (winner, value), (second, other) = ranked[:2]
    difference = paired(figure, groups[winner], groups[second])
    return Lead(figure, winner, value, second, other, difference)


def leaders(shown: Sequence[Figure], groups: Groups) -> dict[str, str]:
    """Return, for each figure that has a clear winner, the label of the policy to mark.

    A winner leads by more than the noise between seeds. With a single seed, which has no noise, any
    lead counts.
    """
    leads = [found for one in shown if (found := lead(one, groups)) is not None]
    return {found.figure.name: found.winner for found in leads if found.is_significant is not False}

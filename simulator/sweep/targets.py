"""What a fleet must keep: limits on figures, and by how much a run of several seeds misses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import msgspec

from simulator.replay.setup import Setup
from simulator.report.aggregate import interval
from simulator.report.row import ReplayRow
from simulator.sweep.errors import SweepError
from simulator.wording import percent, seconds

# Every seed must keep the limits, or the bad end of the 95 % interval of their mean.
Rule = Literal["all", "interval"]


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits; None: any value will do. Shares are of all requests, 0..1."""

    ttft_mean_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_mean_ms: float | None = None  # the mean gap between tokens (ITL) as well
    tpot_p90_ms: float | None = None
    tpot_p99_ms: float | None = None
    goodput_share: float | None = None  # at least, within the set-up's goodput limits
    max_lost_share: float = 0.0  # turned away or lost, at most


@dataclass(frozen=True, slots=True)
class Limit:
    """One of the targets. Lifetime: process."""

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
    """Raises `SweepError` for limits that say nothing or that nothing can keep."""
    problems = []
    for limit in LIMITS:
        value = getattr(targets, limit.field)
        share = limit.field.endswith("_share")
        if value is not None and not (0 <= value <= 1 if share else 0 < value < float("inf")):
            expected = "a share from 0 to 1" if share else "milliseconds above 0"
            problems.append(f"{limit.field}: {value:g}; expected {expected}")
    if all(getattr(targets, limit.field) is None for limit in LIMITS[:-1]):
        names = ", ".join(limit.field for limit in LIMITS[:-1])
        problems.append(f"no target: nothing but lost requests is limited; give one of {names}")
    if problems:
        raise SweepError(problems)


@dataclass(frozen=True, slots=True)
class Kept:
    """One limit against what was measured. Lifetime: report."""

    limit: Limit
    bound: float
    value: float | None  # of the worst seed, or the bad end of the interval; None: nothing there
    seed: int | None  # the worst one

    @property
    def met(self) -> bool:
        """Whether the value is within the bound; a figure that nobody has is not."""
        if self.value is None:
            return False
        return self.value >= self.bound if self.limit.at_least else self.value <= self.bound

    @property
    def reason(self) -> str:
        """Value and bound, as in `TTFT p90: 2.31 s > 1.00 s (seed 3)`."""
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
        """How much of the bound is used: 1 is all of it; less is better."""
        if self.value is None:
            return float("inf")
        if self.limit.at_least:
            return (1 - self.value) / (1 - self.bound) if self.bound < 1 else 1 - self.value
        return self.value / self.bound if self.bound else self.value


def kept(targets: Targets, runs: Sequence[tuple[Setup, ReplayRow]], rule: Rule) -> list[Kept]:
    """Every limit that `targets` sets against the runs of all seeds."""
    return [
        _kept(limit, bound, runs, rule)
        for limit in LIMITS
        if (bound := getattr(targets, limit.field)) is not None
    ]


def _kept(limit: Limit, bound: float, runs: Sequence[tuple[Setup, ReplayRow]], rule: Rule) -> Kept:
    values = [(limit.of(row), setup.seed) for setup, row in runs]
    known = [(value, seed) for value, seed in values if value is not None]
    if len(known) < len(values) or not known:
        return Kept(limit, bound, None, None)
    if rule == "interval":
        found = interval([value for value, _ in known])
        assert found is not None
        end = found.low if limit.at_least else found.high
        return Kept(limit, bound, found.mean if end is None else end, None)
    worst = (min if limit.at_least else max)(known, key=lambda pair: pair[0])
    return Kept(limit, bound, worst[0], worst[1] if len(known) > 1 else None)


def shown(targets: Targets) -> Iterator[str]:
    """The targets in words."""
    for limit in LIMITS:
        bound = getattr(targets, limit.field)
        if bound is not None:
            yield f"{limit.title} {'≥' if limit.at_least else '≤'} {limit.show(bound)}"

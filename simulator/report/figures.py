"""The figures that policies are compared by: where each stands in a row and which way is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from simulator.report.row import ReplayRow
from simulator.wording import percent, ratio, whole

FINE_MS = 100.0

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Lifetime: process."""

    name: str  # its place in the JSON report: "ttft_ms.p90"
    title: str
    better: Better
    show: Callable[[float | None], str]
    meaning: str
    unit: str = ""

    def of(self, row: ReplayRow) -> float | None:
        """Its value in `row`; None where nothing was measured."""
        found: Any = row
        for part in self.name.split("."):
            found = getattr(found, part)
        value: float | None = found
        return value

    def lead(self, value: float, other: float) -> float:
        """By how much `value` is better than `other`; below 0 where it is worse."""
        return other - value if self.better == "lower" else value - other

    def said(self, value: float | None) -> str:
        """The value with its unit, for a sentence."""
        return f"{self.show(value)} {self.unit}".rstrip()


def ms(value: float | None) -> str:
    """Milliseconds; with a decimal where a whole number would hide the difference."""
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
    Figure("hit_rate_tokens", "hits", "higher", percent, "prompt tokens found in the cache"),
    Figure("output_tokens_per_s", "tok/s", "higher", whole, "answers of all workers", "tokens/s"),
    Figure("goodput.share", "good", "higher", percent, "requests within both goodput limits"),
    Figure(
        "load_skew_busy", "max/mean", "lower", ratio, "busiest worker's busy time over the mean"
    ),
    Figure("rejected", "rej.", "lower", whole, "requests turned away"),
    Figure("failed", "lost", "lower", whole, "requests lost after their first token"),
)


def figure(name: str) -> Figure:
    """The figure of that name; `KeyError` lists the valid ones."""
    for one in FIGURES:
        if one.name == name:
            return one
    raise KeyError(f"{name!r} is no figure; there are {', '.join(f.name for f in FIGURES)}")


def labels(rows: Sequence[ReplayRow]) -> list[str]:
    """How each row's policy is called among them: its name, and the parameters that tell it from
    others of that name."""
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

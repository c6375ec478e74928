"""Presents the findings of a routing examination as values, as text for people, and as JSON for
programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from router.doctor.routing.facts import ExaminedWorker, HitsRow, PoolFacts

_MAX_NAMED = 3  # most workers that a finding names
NOTHING_FOUND, CAUSE_FOUND, NOT_ASKED = 0, 1, 2  # exit statuses


@dataclass(frozen=True, slots=True)
class Figure:
    """A sentence with a measured figure, and the page that the figure comes from."""

    says: str
    source: str

    def __str__(self) -> str:
        return f"{self.says} ({self.source})"


@dataclass(frozen=True, slots=True)
class RoutingVerdict:
    """The evidence for one cause, and the change that would remove it."""

    wrong: str  # one sentence
    figures: tuple[Figure, ...]
    change: str  # the one flag, key or variable to change
    weight: float = 1.0  # share of prompt tokens that it touches
    where: str = "the pool"


class RoutingCause(NamedTuple):
    """A row of the catalogue: a cause's name, its description and its function."""

    name: str
    about: str
    judge: Callable[[PoolFacts], RoutingVerdict | None]


class RoutingFinding(NamedTuple):
    """A cause of low cache hits that was found, with its evidence."""

    cause: RoutingCause
    verdict: RoutingVerdict


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """The result of examining why cache hits behind a router are low."""

    facts: PoolFacts
    findings: tuple[RoutingFinding, ...]
    again: str  # the command that asks the same question again

    @property
    def status(self) -> int:
        """The exit status of the command: `CAUSE_FOUND` if a cause was found, else
        `NOTHING_FOUND`.
        """
        return CAUSE_FOUND if self.findings else NOTHING_FOUND

    def text(self) -> str:
        """Return the report as text for people, the cause with the best evidence first."""
        lines = [self._head(), hits_text(self.facts)]
        for place, (cause, verdict) in enumerate(self.findings, 1):
            lines += ["", f"{place}. {cause.name}: {cause.about}, at {verdict.where}"]
            lines.append(f"   wrong     {verdict.wrong}")
            lines += [f"   evidence  {one}" for one in verdict.figures]
            lines.append(f"   change    {verdict.change}")
        if self.findings:
            lines += ["", f"After the change ask again: {self.again}"]
        else:
            lines += _guessed_text(self.facts)
        lines += [f"not looked at: {one}" for one in self.facts.unread]
        return "\n".join("".join(c if c.isprintable() else "?" for c in one) for one in lines)

    def shown(self) -> dict[str, Any]:
        """Return the report as a value for JSON."""
        facts = self.facts
        return {
            "router": facts.url or None,
            "engines": [one.row.url for one in facts.workers] if facts.alone else None,
            "status": self.status,
            "requests": len(facts.decisions),
            "prompt_tokens": facts.prompt_tokens,
            "expected_hit_share": _rounded(facts.expected),
            "reported_hit_share": _rounded(facts.hit_share if facts.alone else facts.reported),
            "findings": [_shown(one) for one in self.findings],
            "again": self.again,
            "not_looked_at": list(facts.unread),
        }

    def _head(self) -> str:
        if not self.findings:
            return "Nothing found."
        count = len(self.findings)
        if count == 1:
            return "1 cause found."
        return f"{count} causes found, the one with the most evidence first."


def hits_text(facts: PoolFacts) -> str:
    """Return the hits of the judged requests as one line of text."""
    if facts.alone:
        if not facts.looked_up_tokens:
            return "Hits: the engines looked up no prompt; only settings were looked at."
        return (
            f"Hits: of {facts.looked_up_tokens:,.0f} prompt tokens that the engines looked up, "
            f"{facts.of_when}, {percent(facts.hit_share)} were in their caches."
        )
    if not facts.decisions:
        return "Hits: the router has sent no request; only settings were looked at."
    told = percent(facts.reported)
    return (
        f"Hits: of {facts.prompt_tokens:,} prompt tokens of {len(facts.decisions)} requests, "
        f"{facts.of_when}, the router expected {percent(facts.expected)} in a cache; workers "
        f"reported {told}."
    )


def _guessed_text(facts: PoolFacts) -> list[str]:
    """Return lines that say why the router only guesses the hits of workers whose KV events it
    reads, one line for each reason. Such guesses may be correct behaviour, so they are no finding.
    """
    guessed: dict[HitsRow, list[ExaminedWorker]] = {}
    for one in facts.serving():
        if one.row.hits is not None and one.row.hits.mode == "approximate" and one.row.events:
            guessed.setdefault(one.row.hits, []).append(one)
    return [
        f"Expected hits are only approximate at {named(workers)}. {hits.reason or ''}"
        + (f" To make them exact: {hits.lift}" if hits.lift else "")
        for hits, workers in guessed.items()
    ]


def percent(share: float) -> str:
    """Return a share as a percentage for people, or "nothing" for NaN."""
    return "nothing" if math.isnan(share) else f"{100 * share:.3g} %"


def named(workers: Iterable[ExaminedWorker]) -> str:
    """Return the names of several workers, shortened if there are many."""
    names = [one.row.name for one in workers]
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _rounded(share: float) -> float | None:
    return None if math.isnan(share) else round(share, 4)


def _shown(finding: RoutingFinding) -> dict[str, Any]:
    cause, verdict = finding
    return {
        "cause": cause.name,
        "about": cause.about,
        "where": verdict.where,
        "wrong": verdict.wrong,
        "evidence": [{"figure": one.says, "source": one.source} for one in verdict.figures],
        "change": verdict.change,
        "weight": round(verdict.weight, 4),
    }

"""Presents the doctor's findings as values, as text for people, and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.doctor.evidence import Evidence

NOTHING, FOUND, UNREADABLE = 0, 1, 2  # exit statuses


class DoctorError(Exception):
    """Raised when a server cannot be examined; the text says which one, what happened, and what to
    do.
    """


@dataclass(frozen=True, slots=True)
class Change:
    """A field of a configuration, its present value, and the value that the operator should give
    it.
    """

    name: str
    now: str
    to: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of the function of one cause: the evidence, and what to change."""

    evidence: str
    changes: tuple[Change, ...] = ()
    # Requests, on average, that would be admitted or batched besides: the largest is named first.
    admits: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One diagnosed cause, with its evidence and the change that removes it."""

    number: int  # of the catalogue
    name: str
    where: str  # server and model
    found: Diagnosis
    source: str

    @property
    def harmless(self) -> bool:
        """True if the operator has nothing to change."""
        return not self.found.changes


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The result of the doctor's examination of engines."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    seconds: float
    unread: tuple[str, ...] = ()  # sources that were not examined
    measured: Mapping[str, Any] | None = None  # service times, where a probe took them
    probe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """The exit status: 1 if something should be changed, else 0."""
        return FOUND if any(not one.harmless for one in self.findings) else NOTHING

    def text(self) -> str:
        """Return the report as text for people, the main cause first."""
        lines = [self._head()]
        for place, one in enumerate(self.findings, 1):
            lines += ["", f"{place}. {one.name} (cause {one.number}) at {one.where}"]
            lines.append(f"   evidence  {one.found.evidence}")
            for change in one.found.changes:
                lines.append(f"   change    {change.name}: {change.now} -> {change.to}")
            if one.harmless:
                lines.append("   change    nothing")
            lines.append(f"   source    {one.source}")
        lines += ["", *self._figures()]
        lines += [f"not looked at: {one}" for one in self.unread]
        return "\n".join(_printable(line) for line in lines)

    def shown(self) -> dict[str, Any]:
        """Return the report as a value for JSON."""
        return {
            "loaded": self.evidence.loaded,
            "status": self.status,
            "watched_s": round(self.seconds, 3),
            "findings": [_finding(one) for one in self.findings],
            "servers": [dict(row) for row in self._rows()],
            "not_looked_at": list(self.unread),
            "probe": dict(self.probe),
            "measured": self.measured,
        }

    def _head(self) -> str:
        if not self.evidence.loaded:
            return (
                f"The servers had no load in {self.seconds:.0f} s. Run the command again under "
                "load, or send load with --probe."
            )
        if not self.findings:
            return f"No cause found in {self.seconds:.0f} s under load."
        count = len(self.findings)
        causes = "1 cause" if count == 1 else f"{count} causes"
        return f"{causes} found in {self.seconds:.0f} s; the first cause costs most."

    def _figures(self) -> list[str]:
        rows = self._rows()
        return [
            "  ".join([str(row["where"]), *(f"{k} {v}" for k, v in row.items() if k != "where")])
            for row in rows
        ]

    def _rows(self) -> list[dict[str, Any]]:
        """Return a row with figures for each model and engine that had load."""
        rows: list[dict[str, Any]] = []
        for server in self.evidence.servers:
            for model in server.models.values():
                if model.requests or model.pending > 0:
                    told: dict[str, float] = {
                        "requests_per_s": model.rate,
                        "mean_batch": model.mean_batch,
                        "queue_ms": model.queue_s * 1e3,
                        "service_ms": model.service_s * 1e3,
                        "waiting": model.waiting,
                        "utilisation": model.utilisation,
                    }
                    rows.append(
                        {"where": f"{server.server.url} {model.config.name}"} | _plain(told)
                    )
            for engine in server.engines:
                if engine.moving and engine.active > 0:
                    told = {
                        "active": engine.active,
                        "scheduled": engine.scheduled,
                        "max": engine.most,
                        "kv_tokens": engine.kv_tokens,
                        "kv_share": engine.kv_share,
                    }
                    rows.append({"where": f"{server.server.url} {engine.model}"} | _plain(told))
        return rows


def number(value: float) -> str:
    """Return a number as people write it: 2,560, 7.9, 0.012."""
    if not math.isfinite(value):
        return "unknown"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}".removesuffix(".0") if abs(value) >= 10 else f"{value:.3g}"


def _plain(told: Mapping[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in told.items() if math.isfinite(value)}


def _finding(one: Finding) -> dict[str, Any]:
    changes: Iterable[Change] = one.found.changes
    return {
        "cause": one.number,
        "name": one.name,
        "where": one.where,
        "evidence": one.found.evidence,
        "changes": [{"field": c.name, "from": c.now, "to": c.to} for c in changes],
        "admits": round(one.found.admits, 3),
        "source": one.source,
    }


def _printable(line: str) -> str:
    """Return the line with its unprintable characters replaced, because a server's name may contain
    any character.
    """
    return "".join(c if c.isprintable() else "?" for c in line)

"""What one look at the admin port found, and rates between two looks."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from router.admin_client import AdminClient

_LATEST = 1_000  # decisions, all that the router keeps
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Lifetime: until the one after the next."""

    at_s: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)

    def total(self, name: str) -> float:
        """The sum of a metric's samples; 0 where there are none."""
        return sum(self.samples.get(name, {}).values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's values by one of its labels."""
        found: dict[str, float] = defaultdict(float)
        for labels, value in self.samples.get(name, {}).items():
            found[dict(labels).get(label, "")] += value
        return dict(found)


@dataclass(frozen=True, slots=True)
class OfWorker:
    """What the latest decisions say of a worker. None: they say nothing."""

    hit_rate: float | None
    ttft_p50_s: float | None


def look(admin: AdminClient) -> Look:
    """Ask. Raises AdminError."""
    answer = admin.ask("GET", "/workers")
    rows, sources = answer["workers"], answer.get("sources", [])
    decisions = admin.ask("GET", f"/explain?last={_LATEST}")["decisions"]
    samples = samples_of(admin.text("/metrics"))
    return Look(time.monotonic(), rows, samples, decisions, sources)


def samples_of(text: str) -> dict[str, dict[Labels, float]]:
    """Prometheus's text format, version 0.0.4: name -> labels -> value. What is none is skipped."""
    found: dict[str, dict[Labels, float]] = defaultdict(dict)
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
        if match is not None:
            labels = tuple(sorted(_LABEL.findall(match[2] or "")))
            try:
                found[match[1]][labels] = float(match[3])
            except ValueError:
                continue
    return dict(found)


def rate(before: Look | None, now: Look, name: str) -> float | None:
    """How fast a counter grows, per second; None: not known, as after a restart."""
    if before is None or now.at_s <= before.at_s:
        return None
    more = now.total(name) - before.total(name)
    return None if more < 0 else more / (now.at_s - before.at_s)


def of_workers(decisions: list[dict[str, Any]]) -> dict[int, OfWorker]:
    """By worker, of the decisions that are kept."""
    prompt: dict[int, int] = defaultdict(int)
    hit: dict[int, int] = defaultdict(int)
    ttft: dict[int, list[float]] = defaultdict(list)
    for one in decisions:
        worker = one["worker"]
        prompt[worker] += one["prompt_tokens"]
        cached = one.get("cached_tokens")
        hit[worker] += one["expected_hit_tokens"] if cached is None else cached
        if one.get("first_token_s") is not None:
            ttft[worker].append(one["first_token_s"])
    return {
        worker: OfWorker(
            hit[worker] / prompt[worker] if prompt[worker] else None,
            statistics.median(ttft[worker]) if ttft[worker] else None,
        )
        for worker in prompt
    }

"""From which load on a rule no longer keeps up, over the scenes that differ by their load alone.

A rule keeps up where its mean time to first token is at most 2 s and at least 0.9 of all requests
are good. Between the last load at which it does and the first at which it does not, the crossing
is interpolated: the logarithm of the time and the share, each linear in the load; the earlier one
counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from simulator.compare.figures import RuleFigures, SceneFigures

MAX_TTFT_MS = 2000.0
LEAST_GOOD = 0.9


class Saturation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one rule. `load` null: it kept up with none of the loads, or (`beyond`) with all."""

    policy: str
    load: float | None
    beyond: float | None  # the highest load tried, where it kept up with it
    below: float | None  # the lowest one, where it did not keep up with it


class Ladder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scenes of ascending load, and what each rule takes; best first."""

    name: str
    load_unit: str
    scenes: tuple[str, ...]
    loads: tuple[float, ...]
    rules: tuple[Saturation, ...]


def ladder(name: str, scenes: Sequence[SceneFigures]) -> Ladder:
    """The ladder of scenes that differ by their load alone, two at least."""
    ordered = sorted(scenes, key=lambda scene: scene.load)
    policies = dict.fromkeys(rule.policy for scene in ordered for rule in scene.rules)
    found = [_saturation(policy, ordered) for policy in policies]
    found.sort(key=_rank, reverse=True)
    return Ladder(
        name,
        ordered[0].load_unit,
        tuple(scene.name for scene in ordered),
        tuple(scene.load for scene in ordered),
        tuple(found),
    )


def keeps_up(rule: RuleFigures) -> bool:
    """Whether the rule is on the good side of both limits."""
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

"""Limits beyond which a panel's value means trouble: the numbers of the alert rules themselves.

A rule that changes changes the colours with it. `severity` gives the colour: what wakes somebody
is red, what waits for the morning is amber.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

RULES = Path(__file__).parent / "prometheus" / "alerts.yml"
LEAST = 1e-6  # stands for "more than 0": Grafana colours what is at least a limit
_NUMBER = r"([0-9.]+)"


@dataclass(frozen=True, slots=True)
class Limit:
    """A value and the side of it on which trouble lies."""

    alert: str  # empty: of a panel that counts alerts
    severity: Literal["critical", "warning"]
    side: Literal["above", "below"]
    value: float


def limit(alert: str, before: str, severity: str = "") -> Limit:
    """The number that follows `before` in the rule of an alert.

    `severity`: of the rule that is meant, where an alert has two.
    """
    rule = _rule(alert, severity)
    found = re.search(re.escape(before) + _NUMBER, " ".join(rule["expr"].split()))
    assert found is not None, f"{alert}: no number after {before!r}"
    value, level = float(found[1]), rule["labels"]["severity"]
    comparison = re.findall(r"[<>]|==", before)
    match comparison[-1:], value:
        case ["=="], 0:
            return Limit(alert, level, "below", 1)
        case ["=="], _:
            return Limit(alert, level, "above", value)
        case ["<"], _:
            return Limit(alert, level, "below", value)
        case _:
            return Limit(alert, level, "above", value or LEAST)


def missing(alert: str) -> Limit:
    """Less than one of what the rule of an alert misses by `unless`."""
    rule = _rule(alert)
    assert " unless " in rule["expr"], f"{alert}: misses nothing"
    return Limit(alert, rule["labels"]["severity"], "below", 1)


def firing(severity: Literal["critical", "warning"]) -> Limit:
    """Any alert that fires, in a panel that counts alerts of this severity."""
    return Limit("", severity, "above", LEAST)


def _rule(alert: str, severity: str = "") -> dict[str, Any]:
    for rule in _rules():
        if rule["alert"] == alert and severity in ("", rule["labels"]["severity"]):
            return rule
    raise KeyError(f"no alert {alert} {severity}".strip())


@cache
def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]

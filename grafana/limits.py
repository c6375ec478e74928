"""Limits beyond which a panel's value means trouble, read from the alert rules.

A change of a rule's number also changes the panel's colours. The severity gives the colour: red for
critical alerts, amber for warnings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

RULES = Path(__file__).parent / "prometheus" / "alerts.yml"
LEAST = 1e-6  # means "more than 0", because Grafana colours values from the limit on
_NUMBER = r"([0-9.]+)"


@dataclass(frozen=True, slots=True)
class Limit:
    """A value, and the side of the value on which trouble lies."""

    alert: str  # empty for a panel that counts alerts
    severity: Literal["critical", "warning"]
    side: Literal["above", "below"]
    value: float


def limit(alert: str, before: str, severity: str = "") -> Limit:
    """Return the limit whose number follows `before` in the rule of an alert.

    `severity` selects the rule if the alert has two rules.
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
    """Return the limit "less than 1" for series whose absence an alert detects by `unless`."""
    rule = _rule(alert)
    assert " unless " in rule["expr"], f"{alert}: the rule has no unless"
    return Limit(alert, rule["labels"]["severity"], "below", 1)


def firing(severity: Literal["critical", "warning"]) -> Limit:
    """Return the limit "more than 0" for a panel that counts firing alerts of a severity."""
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

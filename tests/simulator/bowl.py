"""Replays that take no time: latency is a bowl over the coefficients, its bottom off the start."""

from __future__ import annotations

import math

import msgspec

from policies.published.choice_features import FEATURES
from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow
from tests.simulator import synthetic

BOTTOM = 0.1  # of each coefficient, away from LMetric's


def evaluate(setup: Setup) -> ReplayRow:
    """A row whose means grow with the distance to the bottom."""
    theta = [float(text) for text in setup.policy.partition("theta=")[2].split(",")]
    start = [-1.0 if name in ("log_ptok", "log_batch") else 0.0 for name in FEATURES]
    away = sum((one - other - BOTTOM) ** 2 for one, other in zip(theta, start, strict=True))
    row = synthetic.evaluate(setup)
    grown = math.exp(away)
    return msgspec.structs.replace(
        row,
        requests=10,
        completed=10,
        ttft_ms=msgspec.structs.replace(row.ttft_ms, mean=100.0 * grown),
        e2e_ms=msgspec.structs.replace(row.e2e_ms, mean=900.0 * grown),
    )


def evaluate_never(setup: Setup) -> ReplayRow:
    """A run that fails."""
    raise ValueError(f"no replay of {setup.workload.source}")

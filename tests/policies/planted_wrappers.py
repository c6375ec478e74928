"""Wrappers and policies such as users write, right and wrong ones, which tests name by
specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

INF = np.inf


def shifted(costs, request, fleet, state, *, by: float = 1.0, label: str = ""):
    return costs + by


def first_row_out(costs, request, fleet, state):
    return np.where(np.arange(len(costs)) == 0, INF, costs)


def not_a_number(costs, request, fleet, state):
    return costs * np.nan


def minus_infinity(costs, request, fleet, state):
    return costs - INF


def too_few(costs, request, fleet, state):
    return costs[1:]


def as_list(costs, request, fleet, state):
    return costs.tolist()


def in_place(costs, request, fleet, state):
    costs += 1.0
    return costs


def nan_policy(request, fleet, state):
    return np.full(len(fleet), np.nan)


def by_requests(request, fleet, state):
    return fleet.requests.astype(np.float64)


def waiting_column(request, fleet, state):
    return fleet.queued_prefill_tokens


@dataclass(frozen=True)
class Counting:
    """A wrapper that adds `step` to each cost for every fact that it received."""

    step: int = 1

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step is {self.step}; it must be 1 or more")

    def initial_state(self) -> int:
        return 0

    def observe(self, fact: Any, state: int) -> int:
        if fact == "bad":
            raise TypeError("no such fact")
        return state + self.step

    def adjust(self, costs, request, fleet, state):
        return costs + float(state)

    def terms(self, costs, request, fleet, state):
        return {"seen": np.full(len(fleet), float(state))}

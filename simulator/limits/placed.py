"""A policy that does as it was told: an assignment worked out beforehand, then another policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.load import LoadedPolicy, load

ANYWHERE = -1


@dataclass(frozen=True, slots=True)
class Placed:
    """The nth arrival goes to the nth of `workers` (ids joined by dots); later ones as `then` says.

    Where that worker is not eligible, or its number is -1, `then` chooses among the others.
    Raises ValueError for anything but numbers in `workers`.
    """

    workers: str = ""
    then: str = "round_robin"
    _ids: tuple[int, ...] = field(init=False)
    _then: LoadedPolicy = field(init=False)

    def __post_init__(self) -> None:
        try:
            ids = tuple(int(part) for part in self.workers.split(".") if part)
        except ValueError:
            raise ValueError("workers: expected numbers joined by dots") from None
        object.__setattr__(self, "_ids", ids)
        object.__setattr__(self, "_then", load(self.then))

    def initial_state(self) -> Any:
        return self._then.initial_state()

    def observe(self, fact: Any, state: Any) -> Any:
        return self._then.observe(fact, state)

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        if request.serial < len(self._ids):
            there = fleet.worker_id == self._ids[request.serial]
            if there.any():
                return np.where(there, 0.0, 1.0)
        return self._then.costs(request, fleet, state)


def placed_spec(workers: Sequence[int], then: str = "round_robin") -> str:
    """The policy's specification for `policies.load`."""
    joined = ".".join(map(str, workers))
    return f"simulator.limits.placed:Placed?workers={joined}&then={quote(then, safe='')}"

"""A policy that counts the facts it saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True)
class Counting:
    """Remembers how many facts it saw."""

    step: int = 1

    def initial_state(self) -> int:
        return 0

    def observe(self, fact: Any, state: int) -> int:
        return state + self.step

    def costs(self, request: RequestView, fleet: FleetView, state: int) -> Floats:
        return np.full(len(fleet), float(state))

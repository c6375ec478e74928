"""A policy for tests that counts the facts it receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True)
class Counting:
    """A policy whose state is the number of facts it received."""

    step: int = 1

    def initial_state(self) -> int:
        return 0

    def observe(self, fact: Any, state: int) -> int:
        return state + self.step

    def costs(self, request: RequestView, fleet: FleetView, state: int) -> Floats:
        return np.full(len(fleet), float(state))

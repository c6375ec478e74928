"""Policies that do what no policy should, for tests of a router that has to live with them."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


def raises(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """An error of its own."""
    raise KeyError("no such column")


def exits(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """It takes the router for its own program."""
    sys.exit(3)


def nan(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """NaN is no cost."""
    return np.full(len(fleet), np.nan)


def too_long(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """A cost too many."""
    return np.zeros(len(fleet) + 1)


def sleeps(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """50 ms in the router's only loop."""
    time.sleep(0.05)
    return np.zeros(len(fleet))


def hangs(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """For ever."""
    while True:
        pass


def hangs_in_c(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """For ever, and nobody else's Python runs meanwhile."""
    re.match("(a+)+$", "a" * 60 + "b")
    return np.zeros(len(fleet))


class Forgetful:
    """Its memory fails with the first fact."""

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """Nobody is better."""
        return np.zeros(len(fleet))

    def initial_state(self) -> list[Any]:
        """Nothing."""
        return []

    def observe(self, fact: Any, state: list[Any]) -> list[Any]:
        """Fails."""
        return state[1]  # type: ignore[no-any-return]


class Unborn(Forgetful):
    """Its memory cannot even begin."""

    def initial_state(self) -> list[Any]:
        """Fails."""
        raise OSError("no such file")

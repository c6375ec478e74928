"""Policies that misbehave, for tests of a router that must survive them."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


def raises(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Raise an error instead of returning costs."""
    raise KeyError("no such column")


def exits(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Call `sys.exit`, as if the router were the policy's own program."""
    sys.exit(3)


def nan(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Return NaN as each cost, which is invalid."""
    return np.full(len(fleet), np.nan)


def too_long(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Return one cost more than there are workers."""
    return np.zeros(len(fleet) + 1)


def sleeps(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Block the router's event loop for 50 ms."""
    time.sleep(0.05)
    return np.zeros(len(fleet))


def hangs(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Loop forever in Python."""
    while True:
        pass


def hangs_in_c(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Hang forever in C code that holds the GIL, so that no other Python code runs."""
    re.match("(a+)+$", "a" * 60 + "b")
    return np.zeros(len(fleet))


class Forgetful:
    """A policy whose `observe` fails on the first fact."""

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """Return equal costs for all workers."""
        return np.zeros(len(fleet))

    def initial_state(self) -> list[Any]:
        """Return an empty list as the first state."""
        return []

    def observe(self, fact: Any, state: list[Any]) -> list[Any]:
        """Raise an error for every fact."""
        return state[1]  # type: ignore[no-any-return]


class Unborn(Forgetful):
    """A policy whose `initial_state` fails."""

    def initial_state(self) -> list[Any]:
        """Raise an error instead of returning a state."""
        raise OSError("no such file")

"""A policy that sends nothing anywhere, for tests of requests that are held."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


def hold_all(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """No worker will do."""
    return np.full(len(fleet), np.inf)


def broken(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """NaN is no cost."""
    return np.full(len(fleet), np.nan)

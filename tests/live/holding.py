"""A policy that sends no request to any worker, for tests of held requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


def hold_all(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Return infinite costs, so that the router holds the request."""
    return np.full(len(fleet), np.inf)

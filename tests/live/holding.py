"""A policy that sends nothing anywhere, for tests of requests that are held."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView


def hold_all(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """No worker will do."""
    return np.full(len(fleet), np.inf)

"""Excludes workers whose load has reached a threshold, while other workers are below theirs."""

from __future__ import annotations

import numpy as np

from policies.contract import Bools, FleetView, Floats, Ints


def reached_thresholds(
    fleet: FleetView,
    max_requests: float | None,
    max_queued_tokens: float | None,
    max_kv_fraction: float | None,
) -> Bools | None:
    """Return True for each worker that has reached a load threshold, bool[rows].

    Return None if no worker is excluded. A threshold of the worker itself (its column, unless NaN)
    replaces the policy's parameter; None means no threshold. If all workers have reached a
    threshold, the thresholds do not show which worker has most room. So no worker is excluded then,
    and the cost decides. An unknown share of KV memory in use reaches no threshold.
    """
    reached = at_thresholds(fleet, max_requests, max_queued_tokens, max_kv_fraction)
    if reached is None:
        return None
    return reached if 0 < np.count_nonzero(reached) < len(fleet) else None


def at_thresholds(
    fleet: FleetView,
    max_requests: float | None,
    max_queued_tokens: float | None,
    max_kv_fraction: float | None,
) -> Bools | None:
    """Return True for each worker that has reached a load threshold, even if all have, bool[rows].

    Return None if there are no thresholds. `reached_thresholds` describes the parameters.
    """
    if not (max_requests or max_queued_tokens or max_kv_fraction or fleet.has_thresholds):
        return None
    reached = _reaches(fleet.requests, fleet.max_requests, max_requests)
    reached |= _reaches(fleet.queued_prefill_tokens, fleet.max_queued_tokens, max_queued_tokens)
    # The KV fraction needs several columns, so it is computed only if a threshold needs it.
    if max_kv_fraction is not None or fleet.has_kv_thresholds:
        reached |= _reaches(fleet.kv_fraction, fleet.max_kv_fraction, max_kv_fraction)
    return reached


def check_thresholds(
    max_requests: float | None, max_queued_tokens: float | None, max_kv_fraction: float | None
) -> None:
    """Raise ValueError unless counts are at least 1 and the fraction lies in (0, 1]."""
    for name, limit in (("max_requests", max_requests), ("max_queued_tokens", max_queued_tokens)):
        if limit is not None and not limit >= 1.0:
            raise ValueError(f"{name} is {limit}; it must be 1 or more, or none")
    if max_kv_fraction is not None and not 0.0 < max_kv_fraction <= 1.0:
        raise ValueError(f"max_kv_fraction is {max_kv_fraction}; it must be in (0, 1], or none")


def _reaches(signal: Floats | Ints, own: Floats, default: float | None) -> Bools:
    """Return True for each worker whose `signal` has reached its limit, bool[rows].

    The limit is the worker's `own`, or `default` where that is NaN. If both are unknown, no limit
    is reached.
    """
    limit = own if default is None else np.where(np.isnan(own), default, own)
    reached: Bools = signal >= limit
    return reached

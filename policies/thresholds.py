"""Per-worker thresholds: who may be asked at all, given what each is willing to carry."""

from __future__ import annotations

import numpy as np

from policies.contract import Bools, FleetView, Floats


def within_thresholds(
    fleet: FleetView,
    max_requests: float | None,
    max_queued_tokens: float | None,
    max_kv_fraction: float | None,
) -> Bools:
    """bool[rows]: the rows below all of their thresholds; all rows when none is.

    A worker's own threshold (its column, where not NaN) goes before the policy's parameter; None
    means no threshold. A worker that has reached one is left alone while another one is below
    its own. When all have, the thresholds say nothing about who suffers least, so none is
    excluded and the cost decides. An unknown KV fraction reaches no threshold.
    """
    reached = fleet.requests >= _limit(fleet.max_requests, max_requests)
    reached |= fleet.queued_prefill_tokens >= _limit(fleet.max_queued_tokens, max_queued_tokens)
    reached |= fleet.kv_fraction >= _limit(fleet.max_kv_fraction, max_kv_fraction)
    if reached.all():
        return np.ones(len(fleet), dtype=np.bool_)
    below: Bools = ~reached
    return below


def check_thresholds(
    max_requests: float | None, max_queued_tokens: float | None, max_kv_fraction: float | None
) -> None:
    """Raise ValueError unless counts are at least 1 and the fraction lies in (0, 1]."""
    for name, limit in (("max_requests", max_requests), ("max_queued_tokens", max_queued_tokens)):
        if limit is not None and not limit >= 1.0:
            raise ValueError(f"{name} is {limit}; it must be 1 or more, or none")
    if max_kv_fraction is not None and not 0.0 < max_kv_fraction <= 1.0:
        raise ValueError(f"max_kv_fraction is {max_kv_fraction}; it must be in (0, 1], or none")


def _limit(own: Floats, default: float | None) -> Floats:
    return np.where(np.isnan(own), np.inf if default is None else default, own)

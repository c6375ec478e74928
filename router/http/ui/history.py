"""The last minutes of a router: one row of figures a second, the oldest forgotten."""

from __future__ import annotations

import math

import numpy as np

KEPT = 600  # seconds
# Of the second that ended then; NaN where it says nothing. Errors by whose fault they were.
COLUMNS = (
    *("requests_per_s", "ttft_mean_s", "ttft_p95_s", "hit_share", "expected_hit_share"),
    *("held", "inflight", "imbalance"),
    *("client_errors_per_s", "worker_errors_per_s", "router_errors_per_s"),
)


class History:
    """Lifetime: process; at most `KEPT` samples, numbered from 1."""

    def __init__(self) -> None:
        self._rows = np.full((KEPT, len(COLUMNS)), np.nan)
        self.taken = 0  # ever: the number of the latest sample

    def add(self, sample: tuple[float, ...]) -> None:
        """One more second; its figures in the order of `COLUMNS`."""
        self._rows[self.taken % KEPT] = sample
        self.taken += 1

    def after(self, number: int) -> list[list[float | None]]:
        """The samples that came after that one, oldest first; of those still kept."""
        first = min(max(number, self.taken - KEPT, 0), self.taken)
        kept = self._rows[np.arange(first, self.taken) % KEPT]
        return [[_plain(value) for value in row] for row in kept.tolist()]


def _plain(value: float) -> float | None:
    """JSON has neither NaN nor infinity; five digits are more than a picture shows."""
    return float(f"{value:.5g}") if math.isfinite(value) else None

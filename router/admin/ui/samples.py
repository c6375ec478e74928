"""Keeps the figures of the router's last minutes, one row for each second."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from router.core.core import RouterCore
from router.metrics.registry import RouterMetrics

KEPT = 600  # samples kept, one for each second
# Of the second that ended then; NaN where it says nothing. Errors by whose fault they were.
COLUMNS = (
    *("requests_per_s", "ttft_mean_s", "ttft_p95_s", "hit_share", "expected_hit_share"),
    *("held", "inflight", "imbalance"),
    *("client_errors_per_s", "worker_errors_per_s", "router_errors_per_s"),
    *("refused_per_s", "busy_per_s"),
)


class History:
    """Keeps the latest `KEPT` samples, numbered from 1. Lifetime: process."""

    def __init__(self) -> None:
        self._rows = np.full((KEPT, len(COLUMNS)), np.nan)
        self.taken = 0  # samples so far: the number of the latest one

    def add(self, sample: tuple[float, ...]) -> None:
        """Add the sample of one second; its figures are in the order of `COLUMNS`."""
        self._rows[self.taken % KEPT] = sample
        self.taken += 1

    def after(self, number: int) -> list[list[float | None]]:
        """Return the samples after the sample `number` that are still kept, oldest first."""
        first = min(max(number, self.taken - KEPT, 0), self.taken)
        kept = self._rows[np.arange(first, self.taken) % KEPT]
        return [[_plain(value) for value in row] for row in kept.tolist()]


def _plain(value: float) -> float | None:
    """Return the value with five digits, or None if it is not finite.

    JSON has neither NaN nor infinity.
    """
    return float(f"{value:.5g}") if math.isfinite(value) else None


# Refusals for a reason in the request, not in the router or its pool.
CLIENT_CODES = frozenset({"model_not_found", "context_length_exceeded"})
# Refusals because the pool is full, which is no fault.
FULL_CODES = frozenset({"router_full", "hold_queue_full", "hold_timeout", "displaced"})


class _Counts(NamedTuple):
    """The values of the router's counters at one instant. Lifetime: until the next second."""

    at_s: float
    dispatched: int
    prompt_tokens: int
    expected_tokens: int
    reported_prompt_tokens: int
    reported_hit_tokens: int
    ttft_counts: tuple[int, ...]
    ttft_sum_s: float
    client_errors: int
    worker_errors: int
    router_errors: int
    refused: int
    busy: int


class Sampler:
    """Records a sample of the router's figures once a second. Lifetime: process."""

    def __init__(
        self, core: RouterCore, metrics: RouterMetrics, clock: Callable[[], float]
    ) -> None:
        self.history = History()
        self._core = core
        self._metrics = metrics.requests
        self._clock = clock
        self._before = self._counts()

    def sample(self) -> None:
        """Add a sample of the time since the last sample, which is about a second."""
        before, now, core = self._before, self._counts(), self._core
        self._before = now
        elapsed_s = max(now.at_s - before.at_s, 1e-3)
        fallen = [b - a for a, b in zip(before.ttft_counts, now.ttft_counts, strict=True)]
        tokens = now.prompt_tokens - before.prompt_tokens
        reported = now.reported_prompt_tokens - before.reported_prompt_tokens
        self.history.add(
            (
                (now.dispatched - before.dispatched) / elapsed_s,
                _share(now.ttft_sum_s - before.ttft_sum_s, sum(fallen)),
                quantile(self._metrics.ttft.bounds, fallen, 0.95),
                _share(now.reported_hit_tokens - before.reported_hit_tokens, reported),
                _share(now.expected_tokens - before.expected_tokens, tokens),
                core.held_requests,
                core.inflight_requests,
                self._imbalance(),
                (now.client_errors - before.client_errors) / elapsed_s,
                (now.worker_errors - before.worker_errors) / elapsed_s,
                (now.router_errors - before.router_errors) / elapsed_s,
                (now.refused - before.refused) / elapsed_s,
                (now.busy - before.busy) / elapsed_s,
            )
        )

    def _counts(self) -> _Counts:
        counters, metrics = self._core.counters, self._metrics
        theirs = sum(counters.rejections[code] for code in CLIENT_CODES)
        refused = sum(counters.rejections[code] for code in FULL_CODES)
        return _Counts(
            self._clock(),
            counters.decisions.total(),
            counters.prompt_tokens,
            counters.expected_hit_tokens,
            metrics.reported_prompt_tokens,
            metrics.reported_hit_tokens,
            *metrics.ttft.totals(),
            metrics.client_errors.total() + theirs,
            metrics.worker_errors,
            counters.rejections.total() - theirs - refused + metrics.internal_errors,
            refused,
            metrics.busy_replies,
        )

    def _imbalance(self) -> float:
        """Return the number of requests of the busiest worker divided by the mean of all workers
        that take requests. NaN means that no worker has a request.
        """
        core = self._core
        slots = [worker.slot for worker in core.workers if worker.takes_requests]
        requests = core.columns.requests[slots]
        total = int(requests.sum())
        return float(requests.max()) * len(slots) / total if total else math.nan


def quantile(bounds: tuple[float, ...], counts: list[int], share: float) -> float:
    """Return the value that about `share` of all observations do not exceed. The value is computed
    as by `histogram_quantile` of Prometheus: linearly within a bucket; if it lies beyond the last
    bound, the last bound is returned. NaN means that there are no observations.
    """
    total = sum(counts)
    if not total:
        return math.nan
    upto = np.cumsum(counts)
    at = int(np.searchsorted(upto, share * total))
    if at >= len(bounds):
        return bounds[-1]
    below, low_s = (0, 0.0) if at == 0 else (int(upto[at - 1]), bounds[at - 1])
    return low_s + (bounds[at] - low_s) * (share * total - below) / counts[at]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan

"""Computes the typical speed of a pool's workers, as medians, and the pool's KV capacity."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from policies.arrays import median
from router.core.workers.columns import WorkerColumns


class PoolPace(NamedTuple):
    """The size, speed and KV capacity of the worker pool, as `kvkernels.Trunks.pool` takes them."""

    workers: int = 1 << 30
    prefill_tokens_per_s: float = 15_000.0
    answer_s: float = 0.0  # worker seconds that the tokens of one answer take
    capacity_tokens: float = math.inf  # KV memory of all workers together


_RENEW_S = 0.5
_ANSWER_TOKENS = 128.0  # of an answer, before any has ended
_BATCH_LEAST = 16  # answers that share a step, even where fewer run: more would cost no more


class PaceKeeper:
    """Computes the size, speed and KV capacity of the worker pool, at most twice a second.

    Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._renewed_s = -math.inf
        self._pace = PoolPace()

    def at(self, now_s: float, output_tokens: float) -> PoolPace:
        """Return the size, speed and KV capacity of the pool, at most half a second old.

        `output_tokens` is the mean length of an answer; 0 means that no answer has ended yet.
        """
        if now_s - self._renewed_s < _RENEW_S:
            return self._pace
        self._renewed_s = now_s
        columns = self._columns
        slots = np.flatnonzero(columns.worker_id >= 0)
        if len(slots):
            # numpy's own mean and median take ten times as long of so few rows.
            batch = max(float(np.add.reduce(columns.requests[slots])) / len(slots), _BATCH_LEAST)
            steps_s = (output_tokens or _ANSWER_TOKENS) * median(columns.step_s[slots])
            capacity_tokens = float(np.add.reduce(columns.kv_capacity_tokens[slots]))
            self._pace = PoolPace(
                workers=len(slots),
                prefill_tokens_per_s=median(columns.prefill_tokens_per_s[slots]),
                answer_s=steps_s / batch,
                capacity_tokens=math.inf if math.isnan(capacity_tokens) else capacity_tokens,
            )
        return self._pace

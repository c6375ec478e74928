"""What a pool can do, by its typical worker: what trunks are measured by."""

from __future__ import annotations

import math

import numpy as np

from router.core.columns import WorkerColumns
from router.estimators.trunks import PoolPace

_RENEW_S = 0.5
_BATCH_LEAST = 16  # answers that share a step, even where fewer run: more would cost no more


class PaceKeeper:
    """Lifetime: process."""

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._renewed_s = -math.inf
        self._pace = PoolPace()

    def at(self, now_s: float, output_tokens: float) -> PoolPace:
        """The pace of about now: medians over the workers there are.

        `output_tokens`: of a typical answer.
        """
        if now_s - self._renewed_s < _RENEW_S:
            return self._pace
        self._renewed_s = now_s
        columns = self._columns
        slots = np.flatnonzero(columns.worker_id >= 0)
        if len(slots):
            batch = max(float(columns.requests[slots].mean()), _BATCH_LEAST)
            steps_s = output_tokens * float(np.median(columns.step_s[slots]))
            capacity_tokens = float(columns.kv_capacity_tokens[slots].sum())
            self._pace = PoolPace(
                workers=len(slots),
                prefill_tokens_per_s=float(np.median(columns.prefill_tokens_per_s[slots])),
                answer_s=steps_s / batch,
                capacity_tokens=math.inf if math.isnan(capacity_tokens) else capacity_tokens,
            )
        return self._pace

"""How fast each worker really is, learned from its own first tokens and token gaps.

Rates are exponentially weighted means of logarithms: ratios, not differences, are what matters
between a fast and a slow GPU, and one outlier moves the mean by a bounded factor only. What
attention adds to a token late in a long context is the same for all workers of a model but for
their speed, so it is learned from all of them together (`pair_cost.py`).
"""

from __future__ import annotations

import math

from router.core.columns import Cells, WorkerColumns
from router.core.ledger import Charge

_WEIGHT = 0.1  # of a new sample
_OUTLIER = 4.0  # a sample counts as at most this many times faster or slower than the estimate
_CALIBRATION_TOKENS_MIN = 256  # shorter prefills measure overheads, not speed
# Nor do those that take no longer than a few steps: what they measure is the decode beside them.
_CALIBRATION_STEPS_MIN = 4.0
_RATE_RANGE = (1.0, 1e9)  # tokens a second: no run of absurd samples leads out of these
_STEP_RANGE_S = (1e-6, 10.0)


def _moved(estimate: float, sample: float, bounds: tuple[float, float]) -> float:
    ratio = _within(sample / estimate, 1 / _OUTLIER, _OUTLIER)
    return _within(estimate * math.exp(_WEIGHT * math.log(ratio)), *bounds)


def _within(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


class SpeedEstimator:
    """Keeps `prefill_tokens_per_s`, `step_s` and `attention` of the worker columns.

    Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._cells = Cells(columns)

    def first_token(self, charge: Charge, now_s: float) -> None:
        """A prefill ended. Only one that found an empty queue tells of speed, not of waiting."""
        if not charge.alone or charge.uncached_tokens < _CALIBRATION_TOKENS_MIN:
            return
        cells, slot = self._cells, charge.slot
        elapsed_s, step_s = now_s - charge.dispatched_s, cells.step_s[slot]
        if elapsed_s <= 0:
            return
        known = cells.prefill_tokens_per_s[slot]
        quick = charge.uncached_tokens / elapsed_s > known
        # On average the request had to sit out half a step that was already under way. That is
        # at most half of the time: else a step believed too long would hide the fastest workers.
        prefill_s = elapsed_s - min(step_s, elapsed_s) / 2
        if prefill_s < _CALIBRATION_STEPS_MIN * step_s and not quick:
            return
        tokens, cached = charge.uncached_tokens, charge.prompt_tokens - charge.uncached_tokens
        attention = self._columns.attention
        attention.prefill(tokens, cached, prefill_s * known)
        rate = attention.work(tokens, cached) / prefill_s
        cells.prefill_tokens_per_s[slot] = _moved(known, rate, _RATE_RANGE)

    def token_gap(self, slot: int, gap_s: float) -> None:
        """A running answer took `gap_s` seconds (above 0) per token lately."""
        step_s = self._cells.step_s
        step_s[slot] = _moved(step_s[slot], gap_s, _STEP_RANGE_S)

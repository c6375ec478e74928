"""How long a session's turn takes when its cache is warm: the pause before it, and its decode."""

from __future__ import annotations

import numpy as np

from router.core.columns import WorkerColumns

_WEIGHT = 0.02  # of a new sample
_CALM = 1.3  # a step may take so many times the quickest worker's and still count as calm


class Cycle:
    """Smoothed pause and answer length. Lifetime: process."""

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._pause_s: float | None = None
        self._output_tokens: float | None = None
        self._calm_s = float("inf")

    def returned(self, away_s: float) -> None:
        """A session sent its next request so long after its last answer."""
        self._pause_s = _smooth(self._pause_s, away_s)

    def answered(self, output_tokens: int) -> None:
        """An answer had so many tokens."""
        self._output_tokens = _smooth(self._output_tokens, float(output_tokens))

    @property
    def output_tokens(self) -> float:
        """Tokens of an answer; 0 before the first."""
        return self._output_tokens or 0.0

    def seconds(self, slots: slice | np.ndarray) -> float:
        """Pause plus decode at a calm step time; 0 while nobody has come back yet.

        The step time of now would not do: in a clogged pool it is long, a cycle looks long, and
        then keeping caches warm looks as if it did not pay.
        """
        if self._pause_s is None or self._output_tokens is None:
            return 0.0
        steps_s = self._columns.step_s[slots]
        self._calm_s = min(self._calm_s * 1.001, float(steps_s.min()))
        step_s = min(float(np.median(steps_s)), _CALM * self._calm_s)
        return self._pause_s + self._output_tokens * step_s


def _smooth(known: float | None, sample: float) -> float:
    return sample if known is None else known + _WEIGHT * (sample - known)

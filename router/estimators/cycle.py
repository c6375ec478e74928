"""How long a session's turn takes when its cache is warm: the pause before it, and its decode."""

from __future__ import annotations

import numpy as np

from policies.contract import Floats
from router.core.columns import WorkerColumns

_WEIGHT = 0.02  # of a new sample
_CALM = 1.3  # a step may take so many times the worker's quickest and still count as calm
_FORGET_S = 600.0  # in which a quickest step that is not seen again grows e-fold


class Cycle:
    """Smoothed pause and answer length. Lifetime: process."""

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._pause_s: float | None = None
        self._output_tokens: float | None = None
        self._quickest_s = np.full(len(columns.step_s), np.inf)  # steps lately, by worker slot
        self._ticked_s: float | None = None

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

    def tick(self, now_s: float) -> None:
        """Time passed: see how quick steps are."""
        elapsed_s = 0.0 if self._ticked_s is None else max(now_s - self._ticked_s, 0.0)
        self._ticked_s = now_s
        self._quickest_s *= 1.0 + elapsed_s / _FORGET_S
        np.minimum(self._quickest_s, self._columns.step_s, out=self._quickest_s)
        self._quickest_s[self._columns.worker_id < 0] = np.inf  # nobody's step

    def worker_lost(self, slot: int) -> None:
        """Another worker may come into its slot."""
        self._quickest_s[slot] = np.inf

    def seconds(self, slots: slice | np.ndarray) -> float:
        """Pause plus decode at a calm step time; 0 while nobody has come back yet.

        The mean over these workers. The step time of now would not do: in a clogged pool it is
        long, a cycle looks long, and then keeping caches warm looks as if it did not pay.
        """
        if self._pause_s is None or self._output_tokens is None:
            return 0.0
        calm_s: Floats = self._quickest_s[slots] * _CALM
        np.minimum(calm_s, self._columns.step_s[slots], out=calm_s)
        return self._pause_s + self._output_tokens * (float(np.add.reduce(calm_s)) / len(calm_s))


def _smooth(known: float | None, sample: float) -> float:
    return sample if known is None else known + _WEIGHT * (sample - known)

"""What share of the prompts sent to each worker it held already, of the last minute or so."""

from __future__ import annotations

import math

import numpy as np

from policies.contract import Floats, Ints
from router.core.core import RouterCore
from router.http.decisions import DecisionLog

_FADE_S = 60.0  # time constant: what is older counts less and less


class RecentHits:
    """Sums by worker slot that fade. Lifetime: process.

    Looks once a second at the decisions kept since, at most 1,000: of more it sees a sample.
    """

    def __init__(self, core: RouterCore, decisions: DecisionLog) -> None:
        slots = len(core.columns.worker_id)
        self._core = core
        self._decisions = decisions
        self._seen = decisions.added
        self._worker_id = np.full(slots, -1, dtype=np.int64)  # whose sums a slot has
        self._hit_tokens = np.zeros(slots)
        self._prompt_tokens = np.zeros(slots)

    def look(self, elapsed_s: float) -> None:
        """Take in what was decided since the last look, `elapsed_s` ago."""
        fade = math.exp(-elapsed_s / _FADE_S)
        self._hit_tokens *= fade
        self._prompt_tokens *= fade
        workers = self._core.workers
        for record in self._decisions.latest(self._decisions.added - self._seen):
            worker, decision = workers.get(record.worker_id), record.decision
            if worker is None:
                continue
            slot = worker.slot
            if self._worker_id[slot] != worker.worker_id:
                self._worker_id[slot] = worker.worker_id
                self._hit_tokens[slot] = self._prompt_tokens[slot] = 0.0
            self._hit_tokens[slot] += decision.hit_tokens
            self._prompt_tokens[slot] += decision.prompt_tokens
        self._seen = self._decisions.added

    def shares(self, slots: Ints, worker_ids: Ints) -> Floats:
        """float64[slots]: 0..1 of what was expected to be there; NaN: nothing was sent lately."""
        tokens = np.where(self._worker_id[slots] == worker_ids, self._prompt_tokens[slots], 0.0)
        known = tokens >= 1.0
        shares = np.full(len(slots), np.nan)
        np.divide(self._hit_tokens[slots], tokens, out=shares, where=known)
        return shares

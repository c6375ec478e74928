"""What caches held before anybody was followed: a router that starts again must not take a full
pool for an empty one. Whose the blocks are is not known, so they count like one session that has
been idle since they were found, less what returning sessions turn out to own.
"""

from __future__ import annotations

import numpy as np

from policies.contract import Floats
from router.estimators.return_hazard import ReturnHazard

_HORIZON_S = 60.0  # within which a return counts: nobody knows what these took to compute


class Strangers:
    """By worker slot. Lifetime: process."""

    def __init__(self, slots: int) -> None:
        self._tokens = np.zeros(slots)
        self._found_s = np.zeros(slots)
        self.wanted_tokens: Floats = np.zeros(slots)  # by the chance of a return, as of `weigh`

    def found(self, slot: int, tokens: float, now_s: float) -> None:
        """A worker's cache holds so many tokens of sessions that nobody knows."""
        self._tokens[slot] = self.wanted_tokens[slot] = max(tokens, 0.0)
        self._found_s[slot] = now_s

    def known(self, slot: int, tokens: float) -> None:
        """So many of them belong to a session that has returned."""
        left = max(float(self._tokens[slot]) - tokens, 0.0)
        if self._tokens[slot] > 0.0:
            self.wanted_tokens[slot] *= left / self._tokens[slot]
        self._tokens[slot] = left

    def gone(self, slot: int) -> None:
        """A worker's cache is gone."""
        self._tokens[slot] = self.wanted_tokens[slot] = 0.0

    def weigh(self, hazard: ReturnHazard, now_s: float) -> None:
        """Count them anew by how long they have been idle."""
        if self._tokens.any():
            away_s = np.maximum(now_s - self._found_s, 0.0)
            chance = hazard.within(np.full(len(away_s), _HORIZON_S), away_s)
            self.wanted_tokens = self._tokens * chance

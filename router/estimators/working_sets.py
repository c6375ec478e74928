"""What live sessions want of each worker's cache: private tokens, and each shared trunk once.

A session counts at home, on the worker that it was last sent to, by its weight: the chance that it
returns soon enough for its memory to pay. Sums change with each request and are made anew at each
refresh, so that rounding cannot pile up.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from policies.contract import Bools, Floats, Ints


class WorkingSets:
    """Sums by worker slot. Lifetime: process."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.private_tokens = np.zeros(slots)  # weighted
        self.cold_work = np.zeros(slots)  # tokens of linear work to compute these again, weighted
        self.trunk_tokens = np.zeros(slots)  # of distinct trunks
        self._at: dict[int, Counter[int]] = {}  # trunk -> slot -> sessions

    def shift(self, slot: int, private_tokens: float, cold_work: float) -> None:
        """Add to a worker's sums (or take off, below 0)."""
        self.private_tokens[slot] += private_tokens
        self.cold_work[slot] += cold_work

    def renew(self, home: Ints, private_tokens: Floats, cold_work: Floats) -> None:
        """Make the weighted sums anew: a row for each session, `home` -1 for none."""
        places, rows = home + 1, self._slots + 1
        self.private_tokens[:] = np.bincount(places, private_tokens, minlength=rows)[1:]
        self.cold_work[:] = np.bincount(places, cold_work, minlength=rows)[1:]

    def enter(self, slot: int, trunk: int, tokens: int) -> None:
        """A session with this trunk (0: none) came home to a worker."""
        if trunk:
            sessions = self._at.setdefault(trunk, Counter())
            if not sessions[slot]:
                self.trunk_tokens[slot] += tokens
            sessions[slot] += 1

    def leave(self, slot: int, trunk: int, tokens: int) -> None:
        """It went; the trunk is forgotten there with its last session."""
        if trunk:
            sessions = self._at[trunk]
            sessions[slot] -= 1
            if not sessions[slot]:
                self.trunk_tokens[slot] -= tokens
                del sessions[slot]
                if not sessions:
                    del self._at[trunk]

    def sessions_with(self, trunk: int, slot: int) -> int:
        """How many sessions with this trunk are at home on a worker."""
        return self._at[trunk][slot] if trunk in self._at else 0

    def holding(self, trunk: int) -> Bools:
        """bool[slots]: where a session with this trunk is at home."""
        held = np.zeros(self._slots, dtype=np.bool_)
        if trunk in self._at:
            held[list(self._at[trunk])] = True
        return held

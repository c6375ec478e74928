"""The tokens that live sessions want in each worker's cache: private ones, and shared prefixes.

A session counts at the worker that it was last sent to, by its weight: the chance that it returns
soon enough for its memory to pay. A prefix that sessions share (a trunk) counts once per worker.
The sums change with each request and are computed anew at each refresh, so that rounding errors do
not add up.
"""

from __future__ import annotations

import numpy as np

from policies.contract import Bools
from router.core.workers.columns import float_cells

_SHOWN_TRUNKS = 1024  # whose places are kept as an array, too


class WorkingSets:
    """Sums of wanted tokens by worker slot.

    Lifetime: process.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.private_tokens = np.zeros(slots)  # weighted
        self.cold_work = np.zeros(slots)  # tokens of linear work to compute these again, weighted
        self.trunk_tokens = np.zeros(slots)  # of distinct trunks
        self._private_cells = float_cells(self.private_tokens)
        self._work_cells = float_cells(self.cold_work)
        self._trunk_cells = float_cells(self.trunk_tokens)
        self._at: dict[int, dict[int, int]] = {}  # trunk -> slot -> sessions
        self._tokens: dict[int, int] = {}  # of each trunk at home anywhere
        self._shown: dict[int, Bools] = {}  # what `holding` told of some of them
        self._nowhere = np.zeros(slots, dtype=np.bool_)
        self._nowhere.flags.writeable = False

    @property
    def trunks(self) -> int:
        """Number of trunks that some session holds at some worker."""
        return len(self._at)

    def shift(self, slot: int, private_tokens: float, cold_work: float) -> None:
        """Add to a worker's sums; negative numbers subtract."""
        self._private_cells[slot] += private_tokens
        self._work_cells[slot] += cold_work

    def enter(self, slot: int, trunk: int, tokens: int) -> None:
        """Count a session with a trunk of `tokens` tokens at a worker; trunk 0 means none."""
        if not trunk:
            return
        sessions = self._at.setdefault(trunk, {})
        before = sessions.get(slot, 0)
        sessions[slot] = before + 1
        if not before:
            # All who come and go count what the first one said: a sum must end where it began.
            self._trunk_cells[slot] += self._tokens.setdefault(trunk, tokens)
            if trunk in self._shown:
                self._shown[trunk][slot] = True

    def leave(self, slot: int, trunk: int) -> None:
        """Count a session with a trunk no longer at a worker.

        The worker's last session with the trunk takes the trunk's tokens with it.
        """
        if not trunk:
            return
        sessions = self._at[trunk]
        sessions[slot] -= 1
        if not sessions[slot]:
            self._forget(trunk, slot)

    def clear(self, slot: int) -> None:
        """Reset all sums of a worker that lost its cache."""
        self._private_cells[slot] = self._work_cells[slot] = 0.0
        for trunk in [trunk for trunk, sessions in self._at.items() if slot in sessions]:
            self._forget(trunk, slot)

    def tokens_at(self, slot: int) -> float:
        """Return the tokens that sessions want at a worker: private ones, and each trunk once."""
        # Rounding may leave a sum a hair below nothing until it is made anew.
        return max(float(self.private_tokens[slot] + self.trunk_tokens[slot]), 0.0)

    def sessions_with(self, trunk: int, slot: int) -> int:
        """Return the number of sessions with this trunk at a worker."""
        return self._at[trunk].get(slot, 0) if trunk in self._at else 0

    def tokens_of(self, trunk: int) -> int:
        """Return the tokens of a trunk, or 0 if no worker has it."""
        return self._tokens.get(trunk, 0)

    def holding(self, trunk: int) -> Bools:
        """Return True for each slot with a session that has this trunk, bool[slots], read-only."""
        if trunk not in self._at:
            return self._nowhere
        held = self._shown.get(trunk)
        if held is None:
            if len(self._shown) >= _SHOWN_TRUNKS:
                self._shown.clear()
            held = self._shown[trunk] = np.zeros(self._slots, dtype=np.bool_)
            held[list(self._at[trunk])] = True
        return held

    def _forget(self, trunk: int, slot: int) -> None:
        sessions = self._at[trunk]
        del sessions[slot]
        self._trunk_cells[slot] -= self._tokens[trunk]
        if trunk in self._shown:
            self._shown[trunk][slot] = False
        if not sessions:
            del self._at[trunk], self._tokens[trunk]
            self._shown.pop(trunk, None)

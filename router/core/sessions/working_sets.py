"""Sums up the tokens that live sessions want in each worker's cache. A session's private tokens
count at the worker to which the session was last sent. They are multiplied by the chance that the
session returns in time to use them. A prefix that several sessions share (a trunk) counts once per
worker. Each request changes the sums. They are computed again at each refresh, so that rounding
errors do not add up.
"""

from __future__ import annotations

import numpy as np

from policies.contract import Bools
from router.core.workers.columns import float_cells

_SHOWN_TRUNKS = 1024  # whose places are kept as an array, too


class WorkingSets:
    """The tokens that live sessions want in each worker's cache, summed by worker slot.

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
        """The number of shared prefixes (trunks) that any worker has cached for its sessions."""
        return len(self._at)

    def shift(self, slot: int, private_tokens: float, cold_work: float) -> None:
        """Add to a worker's sums of private tokens and of the work to compute them again.

        Negative numbers subtract. The unit of `cold_work` is one token computed without attention.
        """
        self._private_cells[slot] += private_tokens
        self._work_cells[slot] += cold_work

    def enter(self, slot: int, trunk: int, tokens: int) -> None:
        """Count one more session that uses the shared prefix `trunk` at a worker. `tokens` is the
        length of the prefix, which counts once, however many sessions use it. `trunk` is the chain
        hash of the prefix; 0 means that the session shares no prefix.
        """
        if not trunk:
            return
        sessions = self._at.setdefault(trunk, {})
        before = sessions.get(slot, 0)
        sessions[slot] = before + 1
        if not before:
            # All sessions of a trunk count the tokens that the first one reported, so that the sum
            # ends where it began.
            self._trunk_cells[slot] += self._tokens.setdefault(trunk, tokens)
            if trunk in self._shown:
                self._shown[trunk][slot] = True

    def leave(self, slot: int, trunk: int) -> None:
        """Count one session fewer that uses the shared prefix `trunk` at a worker.

        After the last session, subtract the prefix's tokens from the worker's sum.
        """
        if not trunk:
            return
        sessions = self._at[trunk]
        sessions[slot] -= 1
        if not sessions[slot]:
            self._forget(trunk, slot)

    def clear(self, slot: int) -> None:
        """Set the sums of tokens wanted at a worker to 0, because the worker lost its cache."""
        self._private_cells[slot] = self._work_cells[slot] = 0.0
        for trunk in [trunk for trunk, sessions in self._at.items() if slot in sessions]:
            self._forget(trunk, slot)

    def tokens_at(self, slot: int) -> float:
        """Return the tokens that live sessions want in a worker's cache.

        These are the sessions' private tokens, and each shared prefix (trunk) once.
        """
        # Rounding may leave a sum slightly below zero until it is computed again.
        return max(float(self.private_tokens[slot] + self.trunk_tokens[slot]), 0.0)

    def sessions_with(self, trunk: int, slot: int) -> int:
        """Return how many sessions use the shared prefix `trunk` at the worker in `slot`."""
        return self._at[trunk].get(slot, 0) if trunk in self._at else 0

    def tokens_of(self, trunk: int) -> int:
        """Return the length of the shared prefix `trunk` in tokens, or 0 if no worker has it."""
        return self._tokens.get(trunk, 0)

    def holding(self, trunk: int) -> Bools:
        """Return which worker slots have a session with the shared prefix `trunk`, bool[slots].

        The array is read-only.
        """
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

"""Learns which engines compute the last block of each hit again, and counts their hits without it.
vLLM does so for models with draft heads (EAGLE, MTP), which need hidden states that no cache keeps
(`v1/core/single_type_kv_cache_manager.py`, 2026). Its KV events do not show this, but its answers
do.
"""

from __future__ import annotations

import numpy as np

from policies.contract import Ints

ANSWERS = 8  # one after the other, that say the same


class LastBlocks:
    """Learns from answers which workers compute the last block of each hit again. An answer is
    evidence for it if it found exactly one block less than KV events promised, and against it if it
    found all of them. `ANSWERS` in a row that contradict the present finding about a worker reverse
    it, so a wrong finding is corrected in the same way. Lifetime: process.
    """

    def __init__(self, slots: int) -> None:
        # The block size of workers that compute the last block again; 0: the others.
        self._tokens = np.zeros(slots, dtype=np.int64)
        self._contradictions = [0] * slots  # in a row
        self._any = False

    def learned(self, slot: int) -> bool:
        """Return True if the worker computes the last block of each hit again."""
        return bool(self._tokens[slot])

    def answered(self, slot: int, promised: int, found: int, block_size: int) -> None:
        """Count an answer to a prompt that was alone at its worker.

        promised: how many blocks of the prompt KV events promised; found: how many it had. An
        answer that found nothing says nothing: a block that is gone looks the same.
        """
        contradicts = found > 0 and found == promised - (not self.learned(slot))
        self._contradictions[slot] = self._contradictions[slot] + 1 if contradicts else 0
        if self._contradictions[slot] < ANSWERS:
            return
        self._tokens[slot] = 0 if self.learned(slot) else block_size
        self._contradictions[slot] = 0
        self._any = bool(self._tokens.any())

    def forget(self, slot: int) -> None:
        """Forget what was learned, because the worker left or another engine took its place."""
        self._tokens[slot] = self._contradictions[slot] = 0
        self._any = bool(self._tokens.any())

    def without(self, hits: Ints, slots: slice | Ints) -> Ints:
        """Return the hits of workers without the blocks that are computed again, int64[slots].

        hits: in tokens, int64[slots]; whole blocks, or all of a prompt but its last token.
        """
        if not self._any:
            return hits
        again = self._tokens[slots]
        whole = hits - hits % np.maximum(again, 1)
        kept: Ints = np.maximum(whole - again, 0)
        return kept

"""Learns which engines compute the last block of each hit again, and counts their hits without this
block. vLLM computes it again for models with draft heads (EAGLE, MTP), which need hidden states
that no cache keeps (`v1/core/single_type_kv_cache_manager.py`, 2026). vLLM's KV events do not show
this, but its answers do.
"""

from __future__ import annotations

import numpy as np

from policies.contract import Ints

ANSWERS = 8  # one after the other, that say the same


class LastBlocks:
    """Learns from answers which workers compute the last block of each hit again. If an answer
    found exactly one block less than the KV events promised, this is evidence for it; if the answer
    found all blocks, this is evidence against it. `ANSWERS` in a row that contradict the present
    finding about a worker reverse the finding, so a wrong finding is corrected in the same way.
    Lifetime: process.
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
        """Count an answer to a prompt that was alone at its worker. `promised` is the number of the
        prompt's blocks that KV events promised as cached, and `found` the number that the worker
        found. An answer that found no block proves nothing, because a block that was evicted looks
        the same.
        """
        contradicts = found > 0 and found == promised - (not self.learned(slot))
        self._contradictions[slot] = self._contradictions[slot] + 1 if contradicts else 0
        if self._contradictions[slot] < ANSWERS:
            return
        self._tokens[slot] = 0 if self.learned(slot) else block_size
        self._contradictions[slot] = 0
        self._any = bool(self._tokens.any())

    def forget(self, slot: int) -> None:
        """Forget what was learned about a worker, because it left or another engine took
        its place.
        """
        self._tokens[slot] = self._contradictions[slot] = 0
        self._any = bool(self._tokens.any())

    def without(self, hits: Ints, slots: slice | Ints) -> Ints:
        """Return the hits of workers in tokens without the blocks that are computed again,
        int64[slots]. `hits` are the hits in tokens, int64[slots]: whole blocks, or all of a prompt
        except its last token.
        """
        if not self._any:
            return hits
        again = self._tokens[slots]
        whole = hits - hits % np.maximum(again, 1)
        kept: Ints = np.maximum(whole - again, 0)
        return kept

"""Blocks expected on a worker because of our own dispatches, believed for a while.

They make a burst of siblings see the first one's choice before any engine event tells of it.
Real events confirm them by standing in the index proper; what nobody confirms expires.

What is confirmed is expected on until it expires, even where its worker evicts it before. To drop
it when its request ends was tried: in replays of the bundled conversations (4, 8 and 16 workers of
100,000 KV tokens, round robin) not one expected hit became another one, for hardly anything is
evicted within seconds of its last use; and it took 30 us of a decision over 2,048 blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvkernels import PrefixIndex
from policies.contract import Hashes

Blocks = npt.NDArray[np.int32]


class ExpectedBlocks:
    """Two generations of an index: a block is believed between `ttl_s` / 2 and `ttl_s`.

    Expiry by dropping a generation whole costs nothing per block, so a dispatch stays one native
    call however long its prompt. Lifetime: process.
    """

    def __init__(self, slots: int, max_entries: int, ttl_s: float) -> None:
        self._slots = slots
        self._max_entries = max_entries
        self._half_s = ttl_s / 2
        self._young = PrefixIndex(slots, max_entries=max_entries)
        self._old = PrefixIndex(slots, max_entries=max_entries)
        self._turned_s = float("-inf")
        # Whether anything was ever put there: where no worker's events tell, nothing is.
        self._has_young = self._has_old = False

    def expect(self, slot: int, chain: Hashes, now_s: float) -> None:
        """The worker in `slot` will soon hold this chain."""
        self.expire(now_s)
        self._young.store(slot, chain)
        self._has_young = True

    def raise_prefix(self, blocks: Blocks, chain: Hashes) -> None:
        """Raise `blocks`, int32[slots], to the leading blocks expected on each worker."""
        if self._has_young:
            self._young.raise_prefix(chain, blocks)
        if self._has_old:
            self._old.raise_prefix(chain, blocks)

    def clear_worker(self, slot: int) -> None:
        """Expect nothing of this worker any more."""
        self._young.clear_worker(slot)
        self._old.clear_worker(slot)

    def expire(self, now_s: float) -> None:
        """Forget what is too old. Called with the time of every tick and dispatch."""
        if now_s - self._turned_s < self._half_s:
            return
        if now_s - self._turned_s >= 2 * self._half_s:  # both generations have outlived it
            self._young = PrefixIndex(self._slots, max_entries=self._max_entries)
            self._has_young = False
        self._old, self._has_old = self._young, self._has_young
        self._young = PrefixIndex(self._slots, max_entries=self._max_entries)
        self._has_young = False
        self._turned_s = now_s

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

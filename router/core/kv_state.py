"""What one worker's KV events say: sequence rules, and its block names mapped onto ours.

The stream of a worker is numbered from 0. In order, it makes the index exact ("known"). After a
gap the missed batches are asked for again and later ones wait; when they cannot be had, all that
was known is dropped and rebuilt from what follows, and the hits are a lower bound ("unknown")
until a snapshot or a reset, or until as many blocks were stored as the worker holds: then
whatever was missed has been turned over.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvkernels import PrefixIndex, chain_hashes
from policies.facts import KvEvent, KvEvents, Removed, Stored
from router.core.parked import BlockName, ParkedBlocks, names_of


@dataclass(slots=True)
class KvCounters:
    """What happened to a worker's events, for metrics. Lifetime: worker."""

    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    clears: int = 0
    gaps: int = 0
    restarts: int = 0
    duplicates: int = 0
    orphans: int = 0  # stored blocks that waited for their parent
    dropped_batches: int = 0  # beyond the backlog while a gap was open
    overflows: int = 0  # more blocks stored than any cache holds: evictions must have been missed
    skipped_events: int = 0  # other tiers, partial blocks, foreign block sizes, parked too long

    @property
    def emptied(self) -> int:
        """How often the worker's cache began anew."""
        return self.restarts + self.clears


class KvState:
    """One worker's event stream. Lifetime: worker."""

    def __init__(
        self,
        index: PrefixIndex,
        slot: int,
        block_size: int,
        capacity_blocks: float,
        parked_blocks: int,
        backlog_batches: int,
        resident_blocks: int,
    ) -> None:
        self._index = index
        self._slot = slot
        self._block_size = block_size
        self._capacity_blocks = capacity_blocks
        self._backlog_max = backlog_batches
        self._resident_blocks_max = resident_blocks
        self.counters = KvCounters()
        self.known = False
        self.resyncing = False  # a replay was asked for and has not ended
        self._next_seq = 0
        self._last_live_seq = -1
        self._stored_since_loss = 0
        self._chain_of: dict[BlockName, int] = {}
        self._parked = ParkedBlocks(parked_blocks)
        self._backlog: dict[int, KvEvents] = {}

    @property
    def resident_blocks(self) -> int:
        """Blocks the worker is known to hold."""
        return len(self._chain_of)

    @property
    def parked_blocks(self) -> int:
        """Blocks waiting for their parent."""
        return len(self._parked)

    @property
    def next_seq(self) -> int:
        """Number of the batch that continues what was applied."""
        return self._next_seq

    @property
    def backlog_batches(self) -> int:
        """Batches that wait for the ones missing before them."""
        return len(self._backlog)

    def chains(self, tier: int = 0) -> npt.NDArray[np.uint64]:
        """Chain hashes of the blocks it is known to hold in a tier, in no order."""
        held = self._chain_of.values() if tier == 0 else ()
        return np.fromiter(held, dtype=np.uint64, count=len(held))

    def take(self, batch: KvEvents) -> int | None:
        """Apply a batch. Returns the sequence number to replay from when some are missing."""
        self.counters.batches += 1
        if batch.source == "snapshot":
            return self._take_snapshot(batch)
        if batch.source == "live":
            if batch.seq <= self._last_live_seq:
                self._restart(batch.seq)
            self._last_live_seq = batch.seq
        if batch.seq < self._next_seq:
            self.counters.duplicates += 1
            return None
        if batch.seq == self._next_seq:
            self._apply(batch)
            self._catch_up()
            return None
        self._keep(batch)
        if self.resyncing or batch.source == "replay":
            return None
        self.counters.gaps += 1
        self.known = False
        self.resyncing = True
        return self._next_seq

    def end_replay(self, answered: bool) -> None:
        """No more of the missing batches will come: go on from what there is.

        `answered`: the publisher served the replay, so an empty one means that it never
        published, and the worker holds nothing.
        """
        self.resyncing = False
        if answered and self._next_seq == 0 and not self._backlog:
            self.known = True
        while self._backlog:  # the hole stays: what lies behind it is all there is to build on
            self._forget()
            self.known = False
            self._next_seq = min(self._backlog)
            self._catch_up()

    def close(self) -> None:
        """The worker left: it holds nothing any more."""
        self._forget()
        self._backlog.clear()

    def reset(self) -> None:
        """The worker came back from the dead: trust nothing, expect its stream from 0."""
        self.close()
        self.known = False
        self.resyncing = False
        self._next_seq = 0
        self._last_live_seq = -1

    def _restart(self, seq: int) -> None:
        """Its publisher began anew, so its cache did too."""
        self.counters.restarts += 1
        self.reset()
        self.known = seq == 0

    def _take_snapshot(self, batch: KvEvents) -> int | None:
        older = batch.seq + 1 < self._next_seq  # taken before what we already applied
        if older and self.known:
            self.counters.duplicates += 1
            return None
        self._forget()
        self._next_seq = batch.seq + 1
        for event in batch.events:
            self._apply_event(event)
        self._backlog = {s: b for s, b in self._backlog.items() if s >= self._next_seq}
        self.known = not older
        self.resyncing = False
        self._catch_up()
        if self._backlog or older:  # what came between is in a replay
            self.resyncing = True
            return self._next_seq
        return None

    def _keep(self, batch: KvEvents) -> None:
        if len(self._backlog) >= self._backlog_max:
            self.counters.dropped_batches += 1
            self._backlog.pop(min(self._backlog))
        self._backlog[batch.seq] = batch

    def _catch_up(self) -> None:
        while (batch := self._backlog.pop(self._next_seq, None)) is not None:
            self._apply(batch)
        if not self._backlog and self.resyncing:
            self.resyncing = False
            self.known = True

    def _apply(self, batch: KvEvents) -> None:
        if batch.seq == 0:
            self.known = True  # seen from its first batch on: nothing was missed
        self._next_seq = batch.seq + 1
        for event in batch.events:
            self._apply_event(event)

    def _apply_event(self, event: KvEvent) -> None:
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            self._remove(event)
        else:
            self.counters.clears += 1
            self._forget()
            self.known = True

    def _store(self, event: Stored) -> None:
        whole = event.block_size == self._block_size
        if event.tier != "gpu" or not whole or not _fits(event):
            self.counters.skipped_events += 1
            return
        if self._parked:
            self._parked.revive(names_of(event.hashes))
        queue = [event]
        while queue:  # a parent that arrives late brings its parked descendants along
            stored = queue.pop()
            seed = stored.seed if stored.parent is None else self._chain_of.get(stored.parent)
            if seed is None:
                self._park(stored)
                continue
            names = names_of(stored.hashes)
            self._place(stored, names, seed)
            if self._parked:
                queue += self._parked.wake(names)
                self._drop(self._parked.take_dead(names))

    def _place(self, stored: Stored, names: Sequence[BlockName], seed: int) -> None:
        chain = stored.chain
        if chain is None:
            tokens = np.array(stored.tokens, dtype=np.int32)
            chain = chain_hashes(tokens, self._block_size, seed)
        self._index.store(self._slot, chain)
        self._chain_of.update(zip(names, chain.tolist(), strict=True))
        self.counters.stored_blocks += len(chain)
        self._stored_since_loss += len(chain)
        if not self.known and not self.resyncing:
            self.known = self._stored_since_loss >= self._capacity_blocks
        if len(self._chain_of) > self._resident_blocks_max:
            self.counters.overflows += 1
            self._forget()
            self.known = False

    def _park(self, event: Stored) -> None:
        if self._parked.park(event):
            self.counters.orphans += len(event.hashes)
        else:
            self.counters.skipped_events += 1

    def _remove(self, event: Removed) -> None:
        if event.tier != "gpu":
            self.counters.skipped_events += 1
            return
        names = names_of(event.hashes)
        if self._parked:
            self._parked.evict(names)
        self._drop(names)

    def _drop(self, names: Sequence[BlockName]) -> None:
        known = map(self._chain_of.pop, names, repeat(None))
        chain = [c for c in known if c is not None]
        self.counters.removed_blocks += len(chain)
        if chain:
            self._index.remove(self._slot, array("Q", chain))

    def _forget(self) -> None:
        self._index.clear_worker(self._slot)
        self._chain_of.clear()
        self._parked.clear()
        self._stored_since_loss = 0


def _fits(event: Stored) -> bool:
    """Whether it tells of each block it names what its chain hash is, or its tokens."""
    if event.chain is not None:
        return len(event.chain) == len(event.hashes)
    return len(event.tokens) == len(event.hashes) * event.block_size

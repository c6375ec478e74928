"""One worker's KV events in order: what is missing, what is late, what began anew.

The stream of a worker is numbered from 0. Here alone it is decided what is missing of it; a feed
carries out what is asked, and asks for a snapshot while one is wanted:

- *exact*: all before `next_seq` was seen, and nothing that is known to exist lies behind it.
- *asked* (`resyncing`), on a gap: the missed batches are asked for again, later ones wait. A
  replay that brought some of them is followed by another one; else a snapshot is wanted.
- *lower bound*, when the answers ended and the gap did not: all that was known is dropped and
  rebuilt from what follows. A snapshot, the stream's batch 0 or a cleared cache makes it exact.
- *turned over*, when as many blocks were stored since as it holds: known, not exact.

A number says which batch it is only within one life of its publisher; the payload's digest says
it for good. A replay is therefore asked for from one batch before the first missing one: where
that comes with another digest, the publisher began anew unseen. Where digests are not told, the
numbers alone decide.
"""

from __future__ import annotations

from kvkernels import PrefixIndex, WorkerBlocks
from policies.contract import Hashes
from policies.facts import KvEvents, SavedStream
from router.core.apply_events import apply_events
from router.core.backlog import Backlog
from router.core.frozen import FrozenStream
from router.core.kv_counters import KvCounters
from router.core.publisher import Publisher
from router.core.turnover import Turnover


class KvState:
    """One worker's event stream. Lifetime: worker."""

    def __init__(
        self,
        index: PrefixIndex,
        slot: int,
        block_size: int,
        model: str,
        capacity_blocks: float,
        parked_blocks: int,
        backlog_batches: int,
        resident_blocks: int,
    ) -> None:
        self.blocks = WorkerBlocks(index, slot, block_size, model, parked_blocks)
        self._block_size = block_size
        self._resident_blocks_max = resident_blocks
        self._counters = KvCounters()
        self.resyncing = False  # a replay was asked for and has not ended
        self._exact = False  # all before `next_seq` was seen
        self._turnover = Turnover(capacity_blocks)  # since it was not
        self._doubtful = False  # what we hold was saved by another router, and is unproven
        self._overflowed = False  # it holds more than we may keep of one worker
        self.next_seq = 0  # number of the batch that continues what was applied
        self._progressed = False  # the replay brought something new
        self._skipped_facts = 0
        self._backlog = Backlog(backlog_batches)
        self._publisher = Publisher()

    # --- what is known ----------------------------------------------------------------------

    @property
    def known(self) -> bool:
        """Whether the index tells all that this worker holds; else it tells a lower bound."""
        return (self._exact or self._turnover.over) and not self._lacking and not self.resyncing

    @property
    def exact(self) -> bool:
        """Known from events alone, not because as much was stored as the worker holds.

        Such a turnover takes for gone what was missed; what hits kept alive all along is not.
        """
        return self._exact and self.known

    @property
    def wants_snapshot(self) -> bool:
        """Whether it takes a snapshot to make it exact, for all that was replayed until now."""
        gap = self._lacking and not self._progressed
        return (gap or self._doubtful or not self._exact) and not self._overflowed

    @property
    def _lacking(self) -> bool:
        """Whether batches that are known to exist were not applied."""
        return bool(self._backlog) or self.next_seq <= self._publisher.last_seq

    @property
    def counters(self) -> KvCounters:
        """What happened until now."""
        return self._counters.with_blocks(self.blocks, self._skipped_facts)

    @property
    def emptied(self) -> int:
        """How often the worker's cache began anew."""
        return self._counters.restarts + self._counters.clears

    @property
    def resident_blocks(self) -> int:
        """Blocks the worker is known to hold, in any tier."""
        return len(self.blocks)

    @property
    def parked_blocks(self) -> int:
        """Blocks waiting for their parent."""
        return self.blocks.parked

    @property
    def backlog_batches(self) -> int:
        """Batches that wait for the ones missing before them."""
        return len(self._backlog)

    def chains(self, tier: int = 0) -> Hashes:
        """Chain hashes of the blocks it is known to hold in a tier, in no order."""
        return self.blocks.chains(tier)

    @property
    def first_question(self) -> int:
        """Number to ask from when a feed begins; 0, a snapshot first, where it is not exact."""
        return self._from_seq() if self._doubtful and self._exact else 0

    # --- what it tells ----------------------------------------------------------------------

    def take(self, batch: KvEvents) -> int | None:
        """Apply a batch. Returns the sequence number to replay from when some are missing."""
        self._counters.batches += 1
        if batch.source == "snapshot":
            return self._take_snapshot(batch)
        if batch.source == "replay" and self._publisher.is_outdated(batch.seq):
            self._counters.duplicates += 1
            return None
        kept = self._backlog.has(batch)
        anew = self._publisher.began_anew(batch, kept)
        if anew:
            self._restart(batch)
        self._publisher.heard(batch)
        if batch.seq < self.next_seq or kept:
            self._counters.duplicates += 1
            self._believe(batch)
            return None
        if batch.seq == self.next_seq and not self._doubtful:
            self._progressed |= batch.source == "replay"
            self._apply(batch)
            self._catch_up()
            return None
        self._counters.dropped_batches += self._backlog.keep(batch)
        if self.resyncing or (batch.source == "replay" and not anew):
            return None
        self._counters.gaps += 1
        return self._ask()

    def end_replay(self, answered: bool, began_anew: bool = False) -> int | None:
        """No more of the missing batches will come: go on from what there is.

        `answered`: the publisher served the replay, so an empty one means that it never
        published, and the worker holds nothing. `began_anew`: it lacks what it had published.
        Returns the sequence number to replay from where it is worth asking once more.
        """
        self._publisher.replay_ended()
        if began_anew:
            self._restart()
            return self._ask()
        if self._doubtful:  # nobody has the batch that would prove it
            self._disown()
            if answered:
                return self._ask()
        if self._lacking and self._progressed:
            return self._ask()
        self.resyncing = self._progressed = False
        if answered and self.next_seq == 0 and not self._backlog:
            self._exact = True
        while self._backlog:  # the hole stays: what lies behind it is all there is to build on
            self._forget()
            self._exact = False
            self.next_seq = self._backlog.first_seq
            self._catch_up()
            if answered and self._backlog:  # the next hole may be a better one
                return self._ask()
        return None

    def close(self) -> None:
        """The worker left: it holds nothing any more."""
        self._forget()
        self._backlog.clear()

    def reset(self) -> None:
        """The worker came back from the dead: trust nothing, expect its stream from 0."""
        self._empty()
        self._publisher.begin_anew()

    # --- from one router to the next --------------------------------------------------------

    def frozen(self) -> FrozenStream | None:
        """All that the next router needs to go on from here; None where that is nothing."""
        digest = self._publisher.digest(self.next_seq - 1)
        if not digest or self._doubtful:
            return None
        return FrozenStream(self.next_seq, digest, self._exact, self.blocks.frozen())

    def take_over(self, saved: SavedStream) -> bool:
        """Go on from what a router before this one saved, once its last batch is replayed.

        Until then it is a lower bound, and what comes live waits. False for damaged blocks.
        """
        self.reset()
        try:
            self.blocks.load(saved.blocks)
        except ValueError:
            return False
        self.next_seq = saved.next_seq
        self._publisher.applied(saved.next_seq - 1, saved.digest)
        self._exact = saved.known
        self._doubtful = self.resyncing = True
        self._turnover.begin(self.blocks.stored_blocks)
        return True

    def _believe(self, batch: KvEvents) -> None:
        """The batch before the first missing one came once more, and is the same."""
        if self._doubtful and batch.seq == self.next_seq - 1 and self._publisher.is_known(batch):
            self._doubtful = False
            self._progressed = True
            self._catch_up()

    def _disown(self) -> None:
        self._doubtful = self._exact = False
        self._forget()
        self.next_seq = 0
        self._publisher.begin_anew()

    # --- order ------------------------------------------------------------------------------

    def _restart(self, batch: KvEvents | None = None) -> None:
        """Its publisher began anew, so its cache did too."""
        self._counters.restarts += 1
        self._empty()
        self._publisher.begin_anew(batch)

    def _ask(self) -> int:
        self.resyncing = True
        self._progressed = False
        return self._from_seq()

    def _from_seq(self) -> int:
        """One batch before the first missing one, where we would know it again."""
        last = self.next_seq - 1
        return last if self._publisher.digest(last) else self.next_seq

    def _take_snapshot(self, batch: KvEvents) -> int | None:
        if self._exact and not self._doubtful and batch.seq + 1 < self.next_seq:
            self._counters.duplicates += 1  # taken before what we already applied
            return self._ask() if self._lacking else None
        if self._doubtful:
            self._publisher.disown()
        self._doubtful = self._progressed = False
        self._publisher.heard(batch)
        self._forget()
        self.next_seq = batch.seq + 1
        self._exact = True
        self._apply_events(batch)
        self._backlog.drop_before(self.next_seq)
        self.resyncing = False
        self._catch_up()
        return self._ask() if self._lacking else None  # what came between is in a replay

    def _catch_up(self) -> None:
        while (batch := self._backlog.pop(self.next_seq)) is not None:
            self._apply(batch)
        if not self._backlog:
            self.resyncing = False

    def _apply(self, batch: KvEvents) -> None:
        if batch.seq == 0:
            self._exact = True  # seen from its first batch on: nothing was missed
        self.next_seq = batch.seq + 1
        self._publisher.applied(batch.seq, batch.digest)
        self._apply_events(batch)

    def _apply_events(self, batch: KvEvents) -> None:
        blocks = self.blocks
        applied = apply_events(batch.events, blocks, self._block_size)
        self._skipped_facts += applied.skipped
        if applied.clears:
            self._counters.clears += applied.clears
            self._exact = True
            self._overflowed = False
        if len(blocks) > self._resident_blocks_max:
            self._counters.overflows += 1
            self._forget()
            self._exact = False
            self._overflowed = True
        elif not self._exact and not self.resyncing:
            self._turnover.stored(blocks.stored_blocks)

    def _empty(self) -> None:
        self.close()
        self._exact = self._doubtful = self.resyncing = self._progressed = self._overflowed = False
        self.next_seq = 0

    def _forget(self) -> None:
        self.blocks.clear()
        self._turnover.begin(self.blocks.stored_blocks)

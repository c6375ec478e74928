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

Where another router reads the events, a copy of what it knows comes first, and then the batches
that it applied, in order (`router.replicas.kv_fan`). While these are not heard it is *unheard*.
"""

from __future__ import annotations

from policies.facts import KvCopied, KvEvents, SavedStream
from router.core.apply_events import apply_events
from router.core.frozen import FrozenStream
from router.core.kv_stream import KvStream


class KvState(KvStream):
    """One worker's event stream. Lifetime: worker."""

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
        if answered and not self._backlog:
            self._exact |= self.next_seq == 0
            self.unheard = False
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

    def goes_on_from(self, next_seq: int, digest: int) -> bool:
        """Whether a peer's copy before that batch, after one of `digest`, is of this life of the
        publisher and not behind what we applied: proven by that batch, if any came to us live.
        """
        ours = self._backlog.digest(next_seq - 1) or self._publisher.digest(next_seq - 1)
        is_first = not self._backlog and self._publisher.live_seq < 0
        return next_seq >= self.next_seq and (ours == digest if ours else is_first)

    def take_copy(self, copy: KvCopied) -> int | None:
        """Go on from what a peer knows; batches that came meanwhile are in the backlog.

        Damaged blocks change nothing. Returns the sequence number to replay from, as `take`.
        """
        try:
            self.blocks.load(copy.blocks)
        except ValueError:
            self._counters.refused_copies += 1
            return None
        self._backlog.drop_before(copy.next_seq)
        waiting_seq = self._backlog.last_seq
        self._publisher.go_on(copy.next_seq, copy.live_seq, copy.digest, waiting_seq)
        self.next_seq, self._exact = copy.next_seq, copy.exact
        self._turnover.begin(self.blocks.stored_blocks, copy.turned_over)
        self._doubtful = self._overflowed = self.resyncing = self._progressed = self.unheard = False
        self._catch_up()
        return self._ask() if self._lacking else None

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
        self._doubtful = self._progressed = self.unheard = False
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
        self.unheard = False  # it goes on where we were
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
        self.unheard = False
        self._exact = self._doubtful = self.resyncing = self._progressed = self._overflowed = False
        self.next_seq = 0

    def _forget(self) -> None:
        self.blocks.clear()
        self._turnover.begin(self.blocks.stored_blocks)

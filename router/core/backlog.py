"""Batches that came after a gap, kept until what is missing has come."""

from __future__ import annotations

from heapq import heappop, heappush

from policies.facts import KvEvents
from router.core.wire_events import WireEvents

MAX_BYTES = 64 << 20  # on the wire; as much as our engine keeps for replays


class Backlog:
    """At most `limit` batches of one worker, and `MAX_BYTES`, by number. Lifetime: worker."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._batches: dict[int, KvEvents] = {}
        self._seqs: list[int] = []  # a heap of their numbers, and of some that were taken out

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first_seq(self) -> int:
        """The lowest number; there must be one."""
        while self._seqs[0] not in self._batches:
            heappop(self._seqs)
        return self._seqs[0]

    @property
    def last_seq(self) -> int:
        """The highest number; -1: there is none."""
        return max(self._batches, default=-1)

    def keep(self, batch: KvEvents) -> int:
        """Keep a batch; returns how many were dropped for want of room: the oldest go first."""
        before = self._batches.get(batch.seq)
        if before is None:
            heappush(self._seqs, batch.seq)
        else:
            self._bytes -= _size_bytes(before)
        self._batches[batch.seq] = batch
        self._bytes += _size_bytes(batch)
        dropped = 0
        while len(self) > self._limit or (self._bytes > MAX_BYTES and len(self) > 1):
            self.pop(self.first_seq)
            dropped += 1
        return dropped

    def has(self, batch: KvEvents) -> bool:
        """Whether this very batch is kept, by its number and its digest."""
        kept = self._batches.get(batch.seq)
        return kept is not None and 0 != kept.digest == batch.digest

    def digest(self, seq: int) -> int:
        """Of this batch; 0 where it is not kept, or not known."""
        kept = self._batches.get(seq)
        return 0 if kept is None else kept.digest

    def pop(self, seq: int) -> KvEvents | None:
        """Take this batch out, if it is there."""
        batch = self._batches.pop(seq, None)
        if batch is not None:
            self._bytes -= _size_bytes(batch)
        while self._seqs and self._seqs[0] not in self._batches:
            heappop(self._seqs)
        return batch

    def drop_before(self, seq: int) -> None:
        """Forget all below this number."""
        while self._batches and self.first_seq < seq:
            self.pop(self.first_seq)

    def clear(self) -> None:
        """Forget all."""
        self._bytes = 0
        self._batches.clear()
        self._seqs.clear()


def _size_bytes(batch: KvEvents) -> int:
    return batch.events.size_bytes if isinstance(batch.events, WireEvents) else 0

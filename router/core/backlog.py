"""Batches that came after a gap, kept until what is missing has come."""

from __future__ import annotations

from heapq import heappop, heappush

from policies.facts import KvEvents


class Backlog:
    """At most `limit` batches of one worker, by number. Lifetime: worker."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
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

    def keep(self, batch: KvEvents) -> int:
        """Keep a batch; returns how many were dropped for want of room: the oldest go first."""
        dropped = 0
        if batch.seq not in self._batches:
            if len(self._batches) >= self._limit:
                self.pop(self.first_seq)
                dropped = 1
            heappush(self._seqs, batch.seq)
        self._batches[batch.seq] = batch
        return dropped

    def has(self, batch: KvEvents) -> bool:
        """Whether this very batch is kept, by its number and its digest."""
        kept = self._batches.get(batch.seq)
        return kept is not None and 0 != kept.digest == batch.digest

    def pop(self, seq: int) -> KvEvents | None:
        """Take this batch out, if it is there."""
        batch = self._batches.pop(seq, None)
        while self._seqs and self._seqs[0] not in self._batches:
            heappop(self._seqs)
        return batch

    def drop_before(self, seq: int) -> None:
        """Forget all below this number."""
        while self._batches and self.first_seq < seq:
            self.pop(self.first_seq)

    def clear(self) -> None:
        """Forget all."""
        self._batches.clear()
        self._seqs.clear()

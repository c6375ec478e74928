"""Which batches are of the same life of a worker's publisher.

Numbers begin at 0 with every life of a publisher. A live number that is not above the last one
tells of another life; a batch that comes twice has the same digest both times.
"""

from __future__ import annotations

from policies.facts import KvEvents

_DIGESTS = 512  # of the latest batches


class Publisher:
    """What a worker's stream has shown of its publisher. Lifetime: worker."""

    def __init__(self) -> None:
        self._digests: dict[int, int] = {}  # by number, of the latest batches applied, oldest first
        self.live_seq = -1  # the highest number of this life that came live
        self.last_seq = -1  # ... or any other way
        self._replayed_seq = -1  # of the replay that is being told
        self._outdated_seq = -1  # a publisher that is gone had replayed up to here

    def heard(self, batch: KvEvents) -> None:
        """A batch of this life came, or a snapshot."""
        self.last_seq = max(self.last_seq, batch.seq)
        if batch.source == "live":
            self.live_seq = max(self.live_seq, batch.seq)
        elif batch.source == "replay":
            self._replayed_seq = batch.seq

    def applied(self, seq: int, digest: int) -> None:
        """This batch is behind us; 0: its digest is not known."""
        if not digest:
            return
        if len(self._digests) >= _DIGESTS:
            del self._digests[next(iter(self._digests))]
        self._digests[seq] = digest

    def digest(self, seq: int) -> int:
        """Of a batch that was applied lately; 0 where it is not known."""
        return self._digests.get(seq, 0)

    def is_known(self, batch: KvEvents) -> bool:
        """Whether this very batch was applied."""
        return 0 != self.digest(batch.seq) == batch.digest

    def began_anew(self, batch: KvEvents, kept: bool) -> bool:
        """Whether a batch can only be of another life; `kept`: it came before and waits."""
        if batch.source == "live" and batch.seq <= self.live_seq:
            return not (kept or self.is_known(batch))
        return bool(self.digest(batch.seq) and batch.digest) and not self.is_known(batch)

    def is_outdated(self, seq: int) -> bool:
        """Whether a replayed batch is of a life that is over.

        A restart seen live does not end a replay that the predecessor gave: what follows in it
        has higher numbers, until another one begins lower.
        """
        if seq > self._outdated_seq >= 0:
            self._outdated_seq = seq
            return True
        self._outdated_seq = -1
        return False

    def go_on(self, next_seq: int, live_seq: int, digest: int, waiting_seq: int) -> None:
        """As somebody else heard it, with `next_seq` to come; -1, or live up to `waiting_seq`
        came to us, too.
        """
        self.begin_anew()
        self.live_seq = max(live_seq, waiting_seq)
        self.last_seq = max(next_seq - 1, waiting_seq)
        self.applied(next_seq - 1, digest)

    def disown(self) -> None:
        """What was applied may be of another life: its digests prove nothing."""
        self._digests.clear()

    def replay_ended(self) -> None:
        """No more comes of the replay that was told."""
        self._replayed_seq = self._outdated_seq = -1

    def begin_anew(self, batch: KvEvents | None = None) -> None:
        """Another life begins, with `batch` where that showed it."""
        seen_live = batch is not None and batch.source == "live"
        self._outdated_seq = self._replayed_seq if seen_live else -1
        self.live_seq = self.last_seq = self._replayed_seq = -1
        self._digests.clear()

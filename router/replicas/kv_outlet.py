"""One worker's events on their way from the replica that reads them to all others."""

from __future__ import annotations

from collections import deque

from router.core.frozen import CopiedStream
from router.replicas.kv_messages import (
    MAX_BATCH_PIECES,
    MAX_COPY_PIECES,
    KvBatch,
    KvCopy,
    KvHead,
    KvSaid,
    pieces_of,
)

_QUEUED_BYTES = 8 << 20  # beyond it those who listen get a copy instead

Place = tuple[int, int]  # token and number: what all before this batch have told
NOWHERE: Place = (0, 0)


class Copying:
    """A copy among what is to be said. Its place is kept until it has bytes. Lifetime: copy."""

    def __init__(self, number: int, stream: CopiedStream) -> None:
        self.number = number
        self.stream = stream
        self.pieces: deque[KvCopy] | None = None


class Outlet:
    """Lifetime: from when we begin to read until we end."""

    def __init__(self, worker: str, worker_id: int, token: int, first: int, after: Place) -> None:
        """`after`: the place of which what we know is the state; `NOWHERE`: of none."""
        self.worker, self.worker_id, self.token = worker, worker_id, token
        self.number = first  # of the next batch
        self._first, self._after = first, after
        self._head_due = True
        self._said: deque[KvBatch | Copying] = deque()
        self._size_bytes = 0

    @property
    def has_copy(self) -> bool:
        """One is on its way."""
        return any(type(one) is Copying for one in self._said)

    @property
    def ready(self) -> bool:
        """Whether there is something to be said now."""
        if self._head_due:
            return True
        first = self._said[0] if self._said else None
        return first is not None and not (type(first) is Copying and first.pieces is None)

    @property
    def copies_next(self) -> bool:
        """What comes next is a piece of a copy."""
        return not self._head_due and bool(self._said) and type(self._said[0]) is Copying

    def tell_head(self) -> None:
        """Somebody may not know where we are."""
        self._head_due = True

    def jump(self) -> None:
        """What is known changed in a way that only a copy tells."""
        self.number += 1
        self._head_due = True

    def drop(self) -> None:
        """What waits is not said any more."""
        self._said.clear()
        self._size_bytes = 0
        self._head_due = True

    def batch(self, seq: int, digest: int, payload: bytes) -> bool:
        """The next batch, applied by us in order; False: it must be told by a copy."""
        pieces = pieces_of(payload)
        if len(pieces) > MAX_BATCH_PIECES or self._size_bytes + len(payload) > _QUEUED_BYTES:
            self.drop()
            return False
        number, self.number = self.number, self.number + 1
        for at, body in enumerate(pieces):
            place = self.worker, self.token, number
            self._said.append(KvBatch(*place, seq, digest, at, len(pieces), body))
        self._size_bytes += len(payload)
        return True

    def begin_copy(self, stream: CopiedStream) -> Copying:
        """After all that waits comes a copy; it has its bytes later (`fill`)."""
        copying = Copying(self.number, stream)
        self._said.append(copying)
        return copying

    def fill(self, copying: Copying, blocks: bytes) -> bool:
        """The bytes of its blocks (`FrozenBlocks.dump`); False: these are too many."""
        stream, bodies = copying.stream, pieces_of(blocks)
        if len(bodies) > MAX_COPY_PIECES:
            if copying in self._said:
                self._said.remove(copying)
            return False
        place = self.worker, self.token, copying.number
        how = stream.next_seq, max(stream.live_seq, -1), stream.digest
        flags = stream.exact, stream.turned_over
        copying.pieces = deque(
            KvCopy(*place, *how, *flags, at, len(bodies), body) for at, body in enumerate(bodies)
        )
        return True

    def next(self) -> KvSaid:
        """What comes next; `ready` says whether there is any."""
        if self._head_due:
            self._head_due = False
            return self._head()
        first = self._said[0]
        if type(first) is Copying:
            assert first.pieces
            piece = first.pieces.popleft()
            if not first.pieces:
                self._said.popleft()
            return piece
        assert type(first) is KvBatch
        self._said.popleft()
        self._size_bytes -= len(first.body)
        return first

    def _head(self) -> KvHead:
        """Where we are once all that waits is said; who heard it before that, asks in vain."""
        waiting = next((one.number for one in self._said), self.number)
        return KvHead(self.worker, self.token, waiting, self._first, *self._after)

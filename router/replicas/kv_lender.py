"""Copies of what this replica knows of workers whose events each replica reads for itself.

Told to a replica that has just begun, or has missed events that nobody else tells it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from router.core.frozen import CopiedStream
from router.core.workers import Worker
from router.replicas.kv_credit import CopyCredit
from router.replicas.kv_messages import (
    MAX_COPY_PIECES,
    UNREAD,
    KvCopy,
    KvNone,
    KvSaid,
    pieces_of,
    size_of,
)
from router.replicas.kv_voice import Dump

_MOST_ASKED = 1 << 14  # workers; who asks for more hears nothing, and asks again or elsewhere


class KvLender:
    """One copy at a time. Lifetime: process. `dump` makes bytes of blocks: now, or in a thread."""

    def __init__(
        self,
        worker: Callable[[str], Worker | None],
        credit: CopyCredit,
        on_news: Callable[[], None],
        dump: Dump,
    ) -> None:
        """`worker`: of this name, where we read it for ourselves."""
        self.copies = 0  # begun
        self._worker, self._credit, self._on_news, self._dump = worker, credit, on_news, dump
        self._asked: dict[str, None] = {}  # by worker, in turn
        self._lent: tuple[str, int] | None = None  # whose copy is made or told, and its number
        self._pieces: deque[KvCopy] = deque()
        self._refused: deque[KvNone] = deque()

    def asked(self, name: str) -> None:
        """A peer wants all that we know of this worker."""
        if len(self._asked) < _MOST_ASKED:
            self._asked[name] = None
            self._on_news()

    def drop(self) -> None:
        """The link is down: nobody waits any more."""
        self._asked.clear()
        self._pieces.clear()
        self._refused.clear()
        self._lent = None

    def fetch(self, now_s: float, room_bytes: int) -> tuple[KvSaid, ...]:
        """What comes next, of about so many bytes."""
        self._begin()
        said: list[KvSaid] = []
        while self._refused and room_bytes > 0:
            said.append(self._refused.popleft())
            room_bytes -= size_of(said[-1])
        self._credit.earn(now_s)
        while self._pieces and room_bytes > 0 and not self._credit.is_spent:
            piece = self._pieces.popleft()
            self._credit.spend(len(piece.body))
            said.append(piece)
            room_bytes -= size_of(piece)
            if not self._pieces:
                self._lent = None
        if self._pieces or self._refused or (self._asked and self._lent is None):
            self._on_news()
        return tuple(said)

    def _begin(self) -> None:
        while self._asked and self._lent is None:
            name = next(iter(self._asked))
            del self._asked[name]
            worker = self._worker(name)
            # Of less than all, a copy is of no use; without a digest nobody could prove it.
            stream = worker.kv.copied() if worker is not None and worker.kv.known else None
            if stream is None or (stream.next_seq and not stream.digest):
                self._refused.append(KvNone(name))
                continue
            self.copies += 1
            self._lent = name, self.copies
            self._dump(stream.blocks, partial(self._filled, self._lent, stream))

    def _filled(self, lent: tuple[str, int], stream: CopiedStream, blocks: bytes) -> None:
        if self._lent != lent:
            return
        (name, number), bodies = lent, pieces_of(blocks)
        if len(bodies) > MAX_COPY_PIECES:
            self._lent = None
            self._refused.append(KvNone(name))
        else:
            where = stream.next_seq, max(stream.live_seq, -1), stream.digest
            self._pieces.extend(
                KvCopy(
                    *(name, UNREAD, number, *where, stream.exact, stream.turned_over),
                    *(at, len(bodies), body),
                )
                for at, body in enumerate(bodies)
            )
        self._on_news()

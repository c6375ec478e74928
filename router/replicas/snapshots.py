"""Snapshots of workers' caches, borrowed from peers and lent to them.

Told to a replica that has just begun, or has missed events that nobody else tells it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from router.core.kv_state import CopiedStream
from router.core.workers import Worker
from router.replicas.messages import (
    MAX_COPY_PIECES,
    UNREAD,
    KvAsked,
    KvCopy,
    KvNone,
    KvSaid,
    pieces_of,
    size_of,
)
from router.replicas.publisher import CopyCredit, Dump

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


_AT_ONCE = 4  # workers asked for; others wait
_ASK_AGAIN_S = 0.5  # the first time, the peer may not hear us yet
_PATIENCE_S = 2.0  # with a peer from which nothing comes


class Borrowed(NamedTuple):
    """What a peer knew of a worker before its batch `next_seq`; see `policies.facts.KvCopied`."""

    next_seq: int
    digest: int
    exact: bool
    turned_over: bool
    blocks: bytes


@dataclass(slots=True)
class Wish:
    """Lifetime: until it is answered, or given up."""

    worker: str
    done: Callable[[Borrowed | None], None]  # None: nobody has it
    peer: str | None = None  # who is asked
    left: list[str] | None = None  # whom to ask next; None: nobody was asked yet
    asked_s: float = float("-inf")
    heard_s: float = float("-inf")  # asked first, or something came
    number: int = 0  # of the copy that these pieces are of
    pieces: list[bytes] = field(default_factory=list)


class KvBorrower:
    """Lifetime: process. Sans-I/O."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news
        self._wishes: dict[str, Wish] = {}  # by worker, in turn
        self._peers: frozenset[str] = frozenset()

    def want(self, worker: str, done: Callable[[Borrowed | None], None]) -> Wish:
        """Ask for this worker; `done` is called once, not before this returns."""
        wish = self._wishes[worker] = Wish(worker, done)
        self._on_news()
        return wish

    def drop(self, wish: Wish) -> None:
        """It is not wanted any more, or done."""
        if self._wishes.get(wish.worker) is wish:
            del self._wishes[wish.worker]

    def part(self) -> None:
        """The link is down: nobody answers."""
        for wish in list(self._wishes.values()):
            self._end(wish, None)

    def present(self, peers: Collection[str]) -> None:
        """All peers that are there."""
        self._peers = frozenset(peers)
        for wish in self._wishes.values():
            if wish.peer not in self._peers:
                wish.heard_s = float("-inf")

    def hear(self, peer: str, said: KvCopy | KvNone, now_s: float) -> None:
        """What a peer says of a worker, perhaps to somebody else."""
        wish = self._wishes.get(said.worker)
        if wish is None or wish.peer != peer:
            return
        if type(said) is KvNone:
            wish.heard_s = float("-inf")
            self._on_news()
        elif type(said) is KvCopy and self._is_next(wish, said):
            wish.heard_s = now_s
            wish.pieces.append(said.body)
            if len(wish.pieces) == said.pieces:
                where = said.next_seq, said.digest, said.exact, said.turned_over
                self._end(wish, Borrowed(*where, b"".join(wish.pieces)))

    def fetch(self, now_s: float, room_bytes: int) -> tuple[KvAsked, ...]:
        """Whom to ask now, of about so many bytes."""
        said: list[KvAsked] = []
        for wish in list(islice(self._wishes.values(), _AT_ONCE)):
            if now_s - wish.heard_s > _PATIENCE_S and not self._ask_next(wish, now_s):
                self._end(wish, None)
                self._on_news()  # for those that waited behind it
                continue
            waits = wish.pieces or now_s - wish.asked_s < _ASK_AGAIN_S
            if not waits and room_bytes > 0 and wish.peer is not None:
                wish.asked_s = now_s
                said.append(KvAsked(wish.worker, wish.peer))
                room_bytes -= size_of(said[-1])
        return tuple(said)

    # --- inside -------------------------------------------------------------------------------

    def _ask_next(self, wish: Wish, now_s: float) -> bool:
        """Turn to the next peer; False: there is none left."""
        if wish.left is None:
            peers = sorted(self._peers)
            first = xxh3_64_intdigest(wish.worker.encode()) % max(
                len(peers), 1
            )  # each peer some workers
            wish.left = peers[first:] + peers[:first]
        wish.left = [peer for peer in wish.left if peer in self._peers]
        if not wish.left:
            return False
        wish.peer, wish.pieces = wish.left.pop(0), []
        wish.asked_s, wish.heard_s = float("-inf"), now_s
        return True

    @staticmethod
    def _is_next(wish: Wish, said: KvCopy) -> bool:
        if said.piece == 0:
            wish.number, wish.pieces = said.number, []
        return said.number == wish.number and said.piece == len(wish.pieces)

    def _end(self, wish: Wish, copy: Borrowed | None) -> None:
        self.drop(wish)
        wish.done(copy)

"""Borrows snapshots of workers' caches from peers, and lends snapshots to peers.

A replica needs a snapshot when it has just started, or has missed events that no engine can replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from xxhash import xxh3_64_intdigest

from policies.facts import CacheSnapshot
from router.core.workers.snapshot import decode_snapshot
from router.core.workers.table import Worker
from router.replicas.messages import (
    UNREAD,
    KvAsked,
    KvMessage,
    KvNone,
    KvSnapshot,
    Pieces,
    size_of,
    snapshot_pieces,
)
from router.replicas.publisher import Dump, SnapshotBudget

# Workers; a peer that asks for more gets no answer, and asks again or elsewhere.
_MAX_REQUESTED = 1 << 14


class SnapshotLender:
    """Publishes snapshots to peers that ask for them, one at a time. Lifetime: process."""

    def __init__(
        self,
        worker: Callable[[str], Worker | None],
        budget: SnapshotBudget,
        on_news: Callable[[], None],
        dump: Dump,
    ) -> None:
        """Start without requests. `worker` returns the worker with a name if this replica reads its
        events for itself, otherwise None; `dump` encodes a cache as bytes, at once or in a thread.
        """
        self.snapshots = 0  # begun
        self._worker, self._budget, self._on_news, self._dump = worker, budget, on_news, dump
        self._asked: dict[str, None] = {}  # by worker, in turn
        # The worker whose snapshot is being made or sent, and its number.
        self._lent: tuple[str, int] | None = None
        self._pieces: deque[KvSnapshot] = deque()
        self._refused: deque[KvNone] = deque()

    def on_request(self, name: str) -> None:
        """Note that a peer asks for a snapshot of this worker."""
        if len(self._asked) < _MAX_REQUESTED:
            self._asked[name] = None
            self._on_news()

    def drop(self) -> None:
        """Drop all requests of peers, because the connection to Redis is lost."""
        self._asked.clear()
        self._pieces.clear()
        self._refused.clear()
        self._lent = None

    def fetch(self, now_s: float, room_bytes: int) -> tuple[KvMessage, ...]:
        """Return the next messages to send, about `room_bytes` bytes of them."""
        self._begin()
        message: list[KvMessage] = []
        while self._refused and room_bytes > 0:
            message.append(self._refused.popleft())
            room_bytes -= size_of(message[-1])
        self._budget.earn(now_s)
        while self._pieces and room_bytes > 0 and not self._budget.is_spent:
            piece = self._pieces.popleft()
            self._budget.spend(len(piece.body))
            message.append(piece)
            room_bytes -= size_of(piece)
            if not self._pieces:
                self._lent = None
        if self._pieces or self._refused or (self._asked and self._lent is None):
            self._on_news()
        return tuple(message)

    def _begin(self) -> None:
        while self._asked and self._lent is None:
            name = next(iter(self._asked))
            del self._asked[name]
            worker = self._worker(name)
            # A snapshot of a part of a cache is useless, and without a digest none can be proven.
            frozen = worker.kv.frozen() if worker is not None and worker.kv.known else None
            if frozen is None or (frozen.next_seq and not frozen.digest):
                self._refused.append(KvNone(name))
                continue
            self.snapshots += 1
            self._lent = name, self.snapshots
            self._dump(frozen, partial(self._filled, self._lent))

    def _filled(self, lent: tuple[str, int], body: bytes) -> None:
        if self._lent != lent:
            return
        pieces = snapshot_pieces(lent[0], UNREAD, lent[1], body)
        if pieces is None:
            self._lent = None
            self._refused.append(KvNone(lent[0]))
        else:
            self._pieces = pieces
        self._on_news()


_MAX_LOANS = 4  # workers whose snapshots are requested at a time; others wait
_ASK_AGAIN_S = 0.5  # after the first request the peer may not read this router's messages yet
_PATIENCE_S = 2.0  # timeout for a peer that sends nothing, seconds


@dataclass(slots=True)
class Loan:
    """This replica's request to its peers for a snapshot of one worker's cache. Lifetime: until it
    is answered or given up.
    """

    worker: str
    done: Callable[[CacheSnapshot | None], None]  # None: no peer has it
    peer: str | None = None  # the peer that is being asked
    left: list[str] | None = None  # peers to ask next; None: no peer was asked yet
    requested_s: float = float("-inf")
    last_message_s: float = float("-inf")  # asked first, or something came
    pieces: Pieces = field(default_factory=Pieces)


class SnapshotBorrower:
    """Asks one peer after another for snapshots that this replica lacks. It does no I/O. Lifetime:
    process.
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news
        self._loans: dict[str, Loan] = {}  # by worker, in turn
        self._peers: frozenset[str] = frozenset()

    def request(self, worker: str, done: Callable[[CacheSnapshot | None], None]) -> Loan:
        """Begin to ask peers for a snapshot of this worker's cache. `done` is called once, some
        time after this returns.
        """
        loan = self._loans[worker] = Loan(worker, done)
        self._on_news()
        return loan

    def drop(self, loan: Loan) -> None:
        """Drop a request that was answered or is no longer wanted."""
        if self._loans.get(loan.worker) is loan:
            del self._loans[loan.worker]

    def part(self) -> None:
        """End all requests without an answer, because the connection to Redis is lost."""
        for loan in list(self._loans.values()):
            self._end(loan, None)

    def present(self, peers: Collection[str]) -> None:
        """Set the peers that are running now."""
        self._peers = frozenset(peers)
        for loan in self._loans.values():
            if loan.peer not in self._peers:
                loan.last_message_s = float("-inf")

    def on_message(self, peer: str, message: KvSnapshot | KvNone, now_s: float) -> None:
        """Process a peer's message about a worker, which may be an answer to another replica."""
        loan = self._loans.get(message.worker)
        if loan is None or loan.peer != peer:
            return
        if isinstance(message, KvNone):
            self._turned_away(loan)
            return
        pieces, body = len(loan.pieces), loan.pieces.add("snapshot", message)
        if body is not None:
            self._decoded(loan, body)
        elif len(loan.pieces) > pieces or message.piece == 0:
            loan.last_message_s = now_s

    def fetch(self, now_s: float, room_bytes: int) -> tuple[KvAsked, ...]:
        """Return the requests to send to peers now, about `room_bytes` bytes of them."""
        message: list[KvAsked] = []
        for loan in list(islice(self._loans.values(), _MAX_LOANS)):
            if now_s - loan.last_message_s > _PATIENCE_S and not self._request_from_next_peer(
                loan, now_s
            ):
                self._end(loan, None)
                self._on_news()  # for loans that waited behind it
                continue
            waits = len(loan.pieces) or now_s - loan.requested_s < _ASK_AGAIN_S
            if not waits and room_bytes > 0 and loan.peer is not None:
                loan.requested_s = now_s
                message.append(KvAsked(loan.worker, loan.peer))
                room_bytes -= size_of(message[-1])
        return tuple(message)

    # --- inside -------------------------------------------------------------------------------

    def _request_from_next_peer(self, loan: Loan, now_s: float) -> bool:
        """Choose the next peer to ask. Return False if none is left."""
        if loan.left is None:
            peers = sorted(self._peers)
            first = xxh3_64_intdigest(loan.worker.encode()) % max(
                len(peers), 1
            )  # each peer some workers
            loan.left = peers[first:] + peers[:first]
        loan.left = [peer for peer in loan.left if peer in self._peers]
        if not loan.left:
            return False
        loan.peer = loan.left.pop(0)
        loan.pieces.clear()
        loan.requested_s, loan.last_message_s = float("-inf"), now_s
        return True

    def _decoded(self, loan: Loan, body: bytes) -> None:
        try:
            snapshot = decode_snapshot(body)
        except ValueError:
            self._turned_away(loan)
        else:
            self._end(loan, snapshot)

    def _turned_away(self, loan: Loan) -> None:
        """Ask the next peer at once, because this peer has no usable snapshot."""
        loan.last_message_s = float("-inf")
        self._on_news()

    def _end(self, loan: Loan, snapshot: CacheSnapshot | None) -> None:
        self.drop(loan)
        loan.done(snapshot)

"""Tests of cache copies between peer routers: which peers a replica asks, in which pieces the copy
comes, and what happens if there is none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from policies.facts import CacheSnapshot
from router.core.workers.snapshot import encode_snapshot
from router.replicas.messages import PIECE_BYTES, UNREAD, KvAsked, KvNone, KvSnapshot
from router.replicas.publisher import SnapshotBudget
from router.replicas.snapshots import SnapshotBorrower, SnapshotLender

ROOM = 1 << 20


def piece(at: int, pieces: int, body: bytes, number: int = 1, worker: str = "w") -> KvSnapshot:
    return KvSnapshot(worker, UNREAD, number, at, pieces, body)


class CopyRequester:
    """A replica that asks its peers for the cache state of worker `w`. Lifetime: test."""

    def __init__(self, *peers: str) -> None:
        self.borrower = SnapshotBorrower(lambda: None)
        self.borrower.present(peers)
        self.got: list[CacheSnapshot | None] = []
        self.loan = self.borrower.request("w", self.got.append)

    def requested_peers(self, now_s: float) -> list[str]:
        said = self.borrower.fetch(now_s, ROOM)
        assert all(one == KvAsked("w", one.peer) for one in said)
        return [one.peer for one in said]


def test_peers_are_tried_in_turn_until_none_is_left() -> None:
    requester = CopyRequester("a@1", "b@1", "c@1")
    first = requester.requested_peers(0.0)
    assert requester.requested_peers(0.1) == []
    assert requester.requested_peers(0.6) == first, "it may not have heard us yet"
    requester.borrower.on_message(first[0], KvNone("w"), 0.7)
    second = requester.requested_peers(0.7)
    (third,) = requester.requested_peers(3.0)  # of the second nothing came
    assert sorted([*first, *second, third]) == ["a@1", "b@1", "c@1"]
    requester.borrower.present({*first, *second})
    assert requester.requested_peers(3.1) == []
    assert requester.got == [None]


def test_only_complete_copies_from_the_requested_peer_are_used() -> None:
    requester = CopyRequester("a@1", "b@1")
    (peer,) = requester.requested_peers(0.0)
    other = "b@1" if peer == "a@1" else "a@1"
    hear = requester.borrower.on_message
    hear(other, piece(0, 1, b"not asked"), 0.1)
    hear(peer, piece(1, 3, b"late"), 0.1)
    hear(peer, piece(0, 3, b"one,"), 0.1)
    hear(peer, piece(1, 3, b"of another", number=2), 0.1)
    snapshot = CacheSnapshot(9, 8, 7, True, False, b"again one,two")
    data = encode_snapshot(snapshot)
    hear(peer, piece(0, 2, data[:-3], number=3), 0.2)
    hear(peer, piece(1, 3, b"old"), 0.2)
    hear(other, KvNone("w"), 0.2)
    assert requester.got == []
    assert requester.requested_peers(2.1) == [], "it is on its way"
    hear(peer, piece(1, 2, b"two", number=3), 2.1)
    assert requester.got == [snapshot]
    hear(peer, piece(0, 1, b"more"), 2.2)
    assert len(requester.got) == 1


def test_without_peers_or_a_link_no_copy_is_returned() -> None:
    alone = CopyRequester()
    assert alone.requested_peers(0.0) == []
    cut = CopyRequester("a@1")
    cut.requested_peers(0.0)
    cut.borrower.part()
    given_up = CopyRequester("a@1")
    given_up.borrower.drop(given_up.loan)
    assert given_up.requested_peers(0.0) == []
    assert (alone.got, cut.got, given_up.got) == ([None], [None], [])


class LentWorker:
    """The attributes of a worker that a replica reads when it gives a copy away. Lifetime: test."""

    def __init__(self, known: bool = True, digest: int = 5, next_seq: int = 4) -> None:
        stream = SimpleNamespace(
            next_seq=next_seq, live_seq=3, digest=digest, exact=True, turned_over=False, blocks=None
        )
        self.kv = SimpleNamespace(known=known, frozen=lambda: stream)


def lender_of(workers: dict[str, Any], filled: list[Any]) -> SnapshotLender:
    return SnapshotLender(
        workers.get, SnapshotBudget(), lambda: None, lambda blocks, done: filled.append(done)
    )


def test_a_copy_is_sent_once_to_all_peers_that_requested_it_before() -> None:
    filled: list[Any] = []
    lender = lender_of({"w": LentWorker()}, filled)
    lender.on_request("w")
    lender.on_request("w")
    assert lender.fetch(1.0, ROOM) == ()
    lender.on_request("w")  # too late for this one
    filled.pop()(b"x" * (PIECE_BYTES + 1))
    told = lender.fetch(1.0, ROOM)
    assert [(one.piece, one.pieces, one.token) for one in told] == [(0, 2, UNREAD), (1, 2, UNREAD)]
    lender.fetch(1.1, ROOM)
    assert len(filled) == 1
    assert lender.snapshots == 2


def test_unknown_or_unproven_state_is_not_lent() -> None:
    filled: list[Any] = []
    workers = {"less": LentWorker(known=False), "unproven": LentWorker(digest=0)}
    lender = lender_of(workers | {"idle": LentWorker(digest=0, next_seq=0)}, filled)
    for name in ("less", "unproven", "strange", "idle"):
        lender.on_request(name)
    said = lender.fetch(0.0, ROOM) + lender.fetch(0.1, ROOM)
    assert said == (KvNone("less"), KvNone("unproven"), KvNone("strange"))
    assert len(filled) == 1, "who never published holds nothing"


def test_requests_from_before_a_lost_link_are_not_answered_after_it() -> None:
    filled: list[Any] = []
    lender = lender_of({"w": LentWorker(), "v": LentWorker()}, filled)
    lender.on_request("w")
    lender.on_request("v")
    lender.fetch(0.0, ROOM)
    lender.drop()
    filled.pop()(b"old")
    assert lender.fetch(1.0, ROOM) == ()
    assert filled == []


def test_copies_wait_for_the_send_budget() -> None:
    filled: list[Any] = []
    lender = lender_of({"w": LentWorker()}, filled)
    lender.on_request("w")
    lender.fetch(10.0, ROOM)
    filled.pop()(b"x" * (40 * PIECE_BYTES))
    told = lender.fetch(10.0, 1 << 30)
    assert len(told) < 40
    later = lender.fetch(11.0, 1 << 30)
    assert 0 < len(later) <= 40 - len(told)

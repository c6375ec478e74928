"""Shares a worker's KV events: one replica reads them, and all replicas apply them.

The reader sends its peers each batch that its core applied in order, so that peers apply the same
batches to the same state. When another replica becomes the reader, it continues from the engine's
own sequence numbers; if the former reader died with unsent events, these numbers show the gap.
Other changes, such as a gap that was given up or a snapshot, reach peers on demand as a copy of all
that the reader knows.

Where each replica reads a worker's events for itself, a replica sends a copy only to a peer that
asks: one that has just started, or that missed events which the engine cannot replay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

from policies.facts import CacheSnapshot, Fact, KvCopied, KvEvents, KvHeard, ReplayEnd
from router.core.workers.kv_events import WireEvents
from router.core.workers.snapshot import FrozenCache
from router.core.workers.table import Worker, WorkerTable
from router.replicas.lease import MOST_KEY_CHARS, MOST_LEASES, Election, Leases
from router.replicas.messages import (
    UNREAD,
    KvAsked,
    KvMessage,
    KvNone,
    KvSnapshot,
    KvWanted,
    size_of,
)
from router.replicas.publisher import NOWHERE, Dump, KvPublisher, SnapshotBudget
from router.replicas.snapshots import SnapshotBorrower, SnapshotLender
from router.replicas.subscriber import KvSubscriber, Names


class ElectionClaim:
    """The claim of this replica to read one worker's KV events, as `router.events.feed.ElectedFeed`
    uses it. Lifetime: feed.
    """

    def __init__(
        self,
        worker_id: int,
        address: str,
        workers: WorkerTable,
        publisher: KvPublisher,
        report_fact: Callable[[Fact], None],
        clock: Callable[[], float],
    ) -> None:
        """Make a claim that `open` enters in the election. `address` is where the worker's events
        are published; `report_fact` passes a fact to the core.
        """
        worker = workers.get(worker_id)
        self.worker_id, self.address = worker_id, address
        self.name = "" if worker is None else worker.facts.name
        self.subscriber = KvSubscriber(self.name, lambda: workers.get(worker_id), report_fact)
        self.election: Election  # from `open` to `close`
        self.enter: Callable[[ElectionClaim], Election]  # raises ValueError; set by who made this
        self.leave: Callable[[ElectionClaim], None]
        self._workers, self._publisher, self._report_fact, self._clock = (
            workers,
            publisher,
            report_fact,
            clock,
        )
        self._on_change: Callable[[], None] = lambda: None

    @property
    def reads(self) -> bool:
        """True if this replica is the one that reads the worker's events now."""
        return self._publisher.stream(self.name) is not None

    @property
    def knows(self) -> bool:
        """True if this replica knows all events that the reading replica has published."""
        return self.reads or self.subscriber.is_live

    @property
    def source(self) -> str:
        """The source of this worker's events, in words for people."""
        if self.reads:
            return "read here"
        return (
            f"received from {self.subscriber.reader}" if self.subscriber.is_live else "not received"
        )

    def open(self, on_change: Callable[[], None]) -> None:
        """Enter the election. `on_change` is called whenever `reads` has changed.

        Raises ValueError if another feed here already claims this worker's events, or if there are
        too many addresses.
        """
        self.election = self.enter(self)
        self._on_change = on_change
        self.subscriber.update(self._clock())
        self.elected()

    def close(self) -> None:
        """Leave the election, because the feed ends."""
        self._on_change = lambda: None
        if self.reads:
            self._publisher.close(self.name)
        self.leave(self)

    def report_fact(self, fact: KvEvents | ReplayEnd | KvHeard) -> None:
        """Pass a fact to the core, and publish it to peers if this replica is the reader.

        A `KvHeard` fact is passed to the core only.
        """
        before = self._kv_mark()
        self._report_fact(fact)
        if not self.reads:
            return
        after = self._kv_mark()
        if isinstance(fact, KvHeard):
            if after != before:
                self._publisher.jumped(self.name)
            return
        live = _live(fact)
        if live is not None and _in_order(live.seq, before, after):
            self._publisher.applied(self.name, live.seq, live.digest, live.payload)
        elif after != before or (isinstance(fact, KvEvents) and fact.source != "live"):
            self._publisher.jumped(self.name)

    def missing(self) -> bool:
        """Handle a gap in the events. Return True if the caller should ask the engine to replay the
        missing events.
        """
        if not self.reads:
            self.subscriber.lost(self._clock())
            return False
        return not self.election.hole()

    def elected(self) -> None:
        """Begin or stop to read the worker's events, after the result of the election may have
        changed.
        """
        stream, reads = self._publisher.stream(self.name), self.election.reads
        changed = reads != (stream is not None)
        if stream is not None and (not reads or stream.token != self.election.token):
            self.subscriber.follow(self._publisher.close(self.name), self._clock())
            stream = None
        if reads and stream is None:
            self._begin()
        if changed:
            self._on_change()

    def _begin(self) -> None:
        subscriber, now_s = self.subscriber, self._clock()
        after = subscriber.place if subscriber.in_sync else NOWHERE
        if subscriber.applied and not subscriber.in_sync:
            # Later batches could continue by their numbers alone, over the missed ones.
            self._report_fact(ReplayEnd(now_s, self.worker_id, answered=True, began_anew=True))
        subscriber.begin_reading(now_s)
        self._publisher.open(self.name, self.worker_id, self.election.token, after)

    def _kv_mark(self) -> tuple[int, ...]:
        worker: Worker | None = self._workers.get(self.worker_id)
        return () if worker is None else worker.kv.mark()


class _Live(NamedTuple):
    """A live batch of KV events, as it was received. Lifetime: call."""

    seq: int
    digest: int
    payload: bytes


def _live(fact: KvEvents | ReplayEnd) -> _Live | None:
    if isinstance(fact, ReplayEnd) or fact.source != "live":
        return None
    payload = fact.events.payload if isinstance(fact.events, WireEvents) else None
    return None if payload is None else _Live(fact.seq, fact.digest, payload)


def _in_order(seq: int, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether the batch `seq` directly follows the known state, given the marks of the KV
    state before and after it.
    """
    return before[:1] == (seq,) and bool(before[-1]) and after[:1] == (seq + 1,)


@dataclass(slots=True)
class KvSubscriberCounters:
    """Counts, over all workers, the KV events received from peers. The counts only grow. Lifetime:
    process.
    """

    batches: int = 0
    snapshots: int = 0
    gaps: int = 0
    refused: int = 0

    def add(self, subscriber: KvSubscriber) -> None:
        """Add the counts of one worker's subscriber."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(subscriber, field.name))


class KvSharing:
    """Shares KV events with peers by elections, publishing, subscriptions and snapshots. It does no
    I/O; `dump` encodes a cache's blocks as bytes. Lifetime: process.
    """

    def __init__(
        self,
        identity: str,
        workers: WorkerTable,
        report_fact: Callable[[Fact], None],
        on_news: Callable[[], None],
        dump: Dump | None = None,
    ) -> None:
        """Start without peers. `identity` is this replica's name among peers, and `report_fact`
        passes a fact to the core.

        `on_news` is called when `fetch` has messages to send again.
        """
        dump, budget = dump or _dump_now, SnapshotBudget()
        self.identity = identity
        self.publisher = KvPublisher(workers, on_news, dump, budget)
        self.lender = SnapshotLender(self._own, budget, on_news, dump)
        self.borrower = SnapshotBorrower(on_news)
        self.borrowed = 0  # copies that the core went on from
        self.connected = False
        self._names = Names(workers)
        self._workers, self._report_fact, self._on_news = workers, report_fact, on_news
        self._leases: Leases | None = None
        self._lease_s = 0.0
        self._claims: dict[str, ElectionClaim] = {}  # by the worker's name
        self._elections: dict[str, Election] = {}  # by address
        self._peers: frozenset[str] = frozenset()
        self._gone = KvSubscriberCounters()

    def set_leases(self, leases: Leases, lease_s: float) -> None:
        """Set the leases and their duration. It is called once, before any other method."""
        self._leases, self._lease_s = leases, lease_s

    def claim(self, worker_id: int, address: str) -> ElectionClaim:
        """Return this replica's claim to read a worker's events. It takes effect when its `open` is
        called.
        """
        assert self._leases is not None
        claim = ElectionClaim(
            worker_id, address, self._workers, self.publisher, self._report_fact, self._leases.clock
        )
        claim.enter, claim.leave = self._enter, self._leave
        return claim

    # --- the exchange's ---------------------------------------------------------------------

    def joined(self, now_s: float) -> None:
        """Note that the connection to Redis works now."""
        self.connected = True
        self.publisher.connect()
        for election in list(self._elections.values()):
            election.joined(now_s)

    def parted(self, now_s: float) -> None:
        """Note that the connection to Redis is lost."""
        self.connected = False
        self.publisher.disconnect()
        self.lender.drop()
        self.borrower.part()
        for claim in list(self._claims.values()):
            if not claim.reads:
                claim.subscriber.silent(now_s)
        for election in list(self._elections.values()):
            election.parted()

    def leave(self) -> None:
        """Stop reading the events of all workers, because this replica ends; a peer reads them from
        now on.
        """
        for election in list(self._elections.values()):
            election.leave()

    def present(self, peers: Collection[str], now_s: float) -> None:
        """Set the peers that are running now."""
        self._peers = frozenset(peers)
        self.borrower.present(peers)
        self._silence(lambda reader: reader not in self._peers, now_s)

    def missed(self, peer: str, now_s: float) -> None:
        """Note that a message of this peer was lost or could not be read."""
        for claim in self._claims.values():
            if claim.subscriber.reader == peer and not claim.reads:
                claim.subscriber.behind(now_s)

    def on_messages(self, peer: str, messages: Iterable[KvMessage], now_s: float) -> None:
        """Process the messages of a peer. Messages about unknown workers are ignored."""
        for one in messages:
            if isinstance(one, KvAsked):
                if one.peer == self.identity:
                    self.lender.on_request(one.worker)
            elif isinstance(one, KvNone) or (isinstance(one, KvSnapshot) and one.token == UNREAD):
                self.borrower.on_message(peer, one, now_s)
            elif (claim := self._claims.get(one.worker)) is None:
                continue
            elif isinstance(one, KvWanted):
                self.publisher.on_request(one)
            else:
                if not claim.reads:
                    claim.subscriber.on_message(peer, one, now_s)
                claim.election.outranked(one.token)

    def fetch(self, now_s: float, room_bytes: int) -> tuple[KvMessage, ...]:
        """Return the next messages to send to peers, about `room_bytes` bytes of them."""
        for election in self._elections.values():
            election.consider(now_s, not self._peers, self._lease_s)
        wanted: list[KvMessage] = [*self.borrower.fetch(now_s, room_bytes)]
        for claim in self._claims.values():
            if room_bytes <= 0:
                break
            if not claim.reads and (one := claim.subscriber.next_request(now_s)) is not None:
                wanted.append(one)
                room_bytes -= size_of(one)
        told = self.publisher.fetch(now_s, room_bytes)
        lent = self.lender.fetch(now_s, room_bytes - sum(map(size_of, told)))
        return (*wanted, *told, *lent)

    # --- for whoever looks ------------------------------------------------------------------

    def source(self, worker_name: str) -> str | None:
        """Return from where this worker's events come, in words for people; None if this replica
        has no claim to them.
        """
        claim = self._claims.get(worker_name)
        return None if claim is None else claim.source

    def sources(self) -> Counter[str]:
        """Return how many workers' events are `read` by this replica, `heard` from peers, or
        `unheard`, which means neither.
        """
        found = Counter({"read": 0, "heard": 0, "unheard": 0})
        for claim in self._claims.values():
            found[
                "read" if claim.reads else "heard" if claim.subscriber.is_live else "unheard"
            ] += 1
        return found

    def counters(self) -> KvSubscriberCounters:
        """Return the counts of events received from all peers so far."""
        total = KvSubscriberCounters(
            *(getattr(self._gone, field.name) for field in fields(self._gone))
        )
        for claim in self._claims.values():
            total.add(claim.subscriber)
        return total

    # --- inside -------------------------------------------------------------------------------

    def _own(self, name: str) -> Worker | None:
        """Return the worker with this name if each replica reads its events for itself; otherwise
        None.
        """
        worker_id = None if name in self._claims else self._names.worker_id(name)
        return None if worker_id is None else self._workers.get(worker_id)

    def _silence(self, whose: Callable[[str], bool], now_s: float) -> None:
        for claim in self._claims.values():
            reader = claim.subscriber.reader
            if reader is not None and whose(reader) and not claim.reads:
                claim.subscriber.silent(now_s)

    def _enter(self, claim: ElectionClaim) -> Election:
        leases, address = self._leases, claim.address
        assert leases is not None
        if not claim.name or claim.name in self._claims:
            raise ValueError(f"the events of worker {claim.worker_id} are claimed already")
        election = self._elections.get(address)
        if election is None:
            if len(self._elections) >= MOST_LEASES or len(address) > MOST_KEY_CHARS // 2:
                raise ValueError(f"too many addresses to be elected for, or too long: {address!r}")
            election = Election(address, leases, leases.clock(), self.connected)
            self._elections[address] = election
        self._claims[claim.name] = claim
        election.candidates.append(claim)
        return election

    def _leave(self, claim: ElectionClaim) -> None:
        del self._claims[claim.name]
        self._gone.add(claim.subscriber)
        election = self._elections[claim.address]
        election.candidates.remove(claim)
        if not election.candidates:
            del self._elections[claim.address]
            election.close()


def _dump_now(frozen: FrozenCache, done: Callable[[bytes], None]) -> None:
    done(frozen.encoded())


log = logging.getLogger(__name__)

_LINK_S = 1.0  # time that the link has to come up, once, seconds
_COPY_S = 10.0  # timeout of a copy, seconds; live batches are kept meanwhile
_CATCH_UP_S = 0.25  # for this router's own events to reach the state of the peer's copy
_CHECK_S = 0.01
_MAX_COPIES = 3  # a copy that ends before the first batch that came to us is proven by none


class Borrowing:
    """Lets the core continue from a peer's snapshot of a worker's cache, once the snapshot is
    proven right. Lifetime: process.
    """

    def __init__(
        self,
        fan: KvSharing,
        workers: WorkerTable,
        report_fact: Callable[[Fact], None],
        clock: Callable[[], float],
    ) -> None:
        self._fan, self._workers, self._report_fact, self._clock = fan, workers, report_fact, clock
        self._is_new = True  # the link may not be up only because it was not tried yet

    async def borrow(self, worker_id: int, live_seq: Callable[[], int]) -> bool:
        """Pass a peer's snapshot of this worker's cache to the core. Return False if no peer has a
        snapshot, or if none can be proven right.

        `live_seq` returns the sequence number of the latest batch that arrived live, or -1 if none
        did.
        """
        await self._linked()
        for _ in range(_MAX_COPIES):
            worker = self._workers.get(worker_id)
            if worker is None or not self._fan.connected or worker.kv.exact:
                return False
            copy = await self._copy(worker.facts.name)
            if copy is None:
                return False
            await self._until(partial(_is_past, live_seq, copy.next_seq - 1), _CATCH_UP_S)
            if self._take(worker_id, copy):
                return True
        return False

    async def _linked(self) -> None:
        if self._is_new:
            await self._until(lambda: self._fan.connected, _LINK_S)
            self._is_new = False

    async def _copy(self, name: str) -> CacheSnapshot | None:
        answer: asyncio.Future[CacheSnapshot | None] = asyncio.get_running_loop().create_future()

        def done(copy: CacheSnapshot | None) -> None:
            if not answer.done():
                answer.set_result(copy)

        loan = self._fan.borrower.request(name, done)
        try:
            async with asyncio.timeout(_COPY_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._fan.borrower.drop(loan)

    @staticmethod
    async def _until(reached: Callable[[], bool], most_s: float) -> None:
        for _ in range(round(most_s / _CHECK_S)):
            if reached():
                return
            await asyncio.sleep(_CHECK_S)

    def _take(self, worker_id: int, copy: CacheSnapshot) -> bool:
        worker = self._workers.get(worker_id)
        if worker is None or not worker.kv.can_continue_from(copy.next_seq, copy.digest):
            return False
        refused = worker.kv.counters.refused_copies
        # All batches before `next_seq` came live to that peer, or could have: a lower number from
        # now on, unless it waits here, shows another life of the publisher.
        live = replace(copy, live_seq=copy.next_seq - 1)
        self._report_fact(KvCopied(self._clock(), worker_id, live))
        if worker.kv.counters.refused_copies > refused:
            return False
        self._fan.borrowed += 1
        log.info(
            "worker %d: took its cache as of batch %d from a peer router",
            worker_id,
            copy.next_seq - 1,
        )
        return True


def _is_past(live_seq: Callable[[], int], seq: int) -> bool:
    return live_seq() >= seq

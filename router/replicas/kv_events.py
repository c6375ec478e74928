"""KV events that one replica reads and all know: who reads, what is told, what is heard.

The reader tells its peers each batch that its core applied in order. So they apply the same ones to
the same state, whatever the reader went through, and go on from there with the engine's numbers
when one of them reads next: where a reader took events along when it died, the numbers show a hole.
What changed in another way, a gap that was given up, a snapshot, travels as a copy of all that the
reader knows, on demand.

Workers whose events each replica reads for itself are told of only to one that asks: it has begun
just now, or missed what the engine cannot tell again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

from kvkernels import FrozenBlocks
from policies.facts import Fact, KvCopied, KvEvents, ReplayEnd
from router.core.kv_events import WireEvents
from router.core.workers import Worker, WorkerTable
from router.replicas.lease import MOST_KEY_CHARS, MOST_LEASES, Election, Leases
from router.replicas.messages import UNREAD, KvAsked, KvCopy, KvNone, KvSaid, KvWanted, size_of
from router.replicas.publisher import NOWHERE, CopyCredit, Dump, KvVoice
from router.replicas.snapshots import Borrowed, KvBorrower, KvLender
from router.replicas.subscriber import Heard, Names


class Claim:
    """A worker's events, as `router.events.feed` wants them. Lifetime: feed."""

    def __init__(
        self,
        worker_id: int,
        address: str,
        workers: WorkerTable,
        voice: KvVoice,
        tell: Callable[[Fact], None],
        clock: Callable[[], float],
    ) -> None:
        """`address`: where the events are to be had; `tell` hands the core a fact."""
        worker = workers.get(worker_id)
        self.worker_id, self.address = worker_id, address
        self.name = "" if worker is None else worker.facts.name
        self.heard = Heard(self.name, lambda: workers.get(worker_id), tell)
        self.election: Election  # from `open` to `close`
        self.enter: Callable[[Claim], Election]  # raises ValueError; set by who made this
        self.leave: Callable[[Claim], None]
        self._workers, self._voice, self._tell, self._clock = workers, voice, tell, clock
        self._on_change: Callable[[], None] = lambda: None

    @property
    def reads(self) -> bool:
        """Whether the events are to be read here, now."""
        return self._voice.outlet(self.name) is not None

    @property
    def knows(self) -> bool:
        """All that the reader tells is known here."""
        return self.reads or self.heard.heard

    @property
    def source(self) -> str:
        """Where its events come from, for people."""
        if self.reads:
            return "read here"
        return f"heard from {self.heard.reader}" if self.heard.heard else "not heard"

    def open(self, on_change: Callable[[], None]) -> None:
        """`on_change` is told whenever `reads` has changed. Raises ValueError where somebody has
        this worker's events already.
        """
        self.election = self.enter(self)
        self._on_change = on_change
        self.heard.update(self._clock())
        self.elected()

    def close(self) -> None:
        """Its feed ends."""
        self._on_change = lambda: None
        if self.reads:
            self._voice.close(self.name)
        self.leave(self)

    def tell(self, fact: KvEvents | ReplayEnd) -> None:
        """What was read, to the core and to peers."""
        before = self._kv_mark()
        self._tell(fact)
        if not self.reads:
            return
        after = self._kv_mark()
        live = _live(fact)
        if live is not None and _in_order(live.seq, before, after):
            self._voice.applied(self.name, live.seq, live.digest, live.payload)
        elif after != before or (isinstance(fact, KvEvents) and fact.source != "live"):
            self._voice.jumped(self.name)

    def missing(self) -> bool:
        """Events are missing. Whether whoever reads them is to ask for them."""
        if not self.reads:
            self.heard.lost(self._clock())
            return False
        return not self.election.hole()

    def elected(self) -> None:
        """Begin to read, or end, as the election says."""
        outlet, reads = self._voice.outlet(self.name), self.election.reads
        changed = reads != (outlet is not None)
        if outlet is not None and (not reads or outlet.token != self.election.token):
            self.heard.follow(self._voice.close(self.name), self._clock())
            outlet = None
        if reads and outlet is None:
            self._begin()
        if changed:
            self._on_change()

    def _begin(self) -> None:
        heard, now_s = self.heard, self._clock()
        after = heard.place if heard.in_step else NOWHERE
        if heard.applied and not heard.in_step:
            # What follows could go on by its number alone, over what we missed.
            self._tell(ReplayEnd(now_s, self.worker_id, answered=True, began_anew=True))
        heard.begin_reading(now_s)
        self._voice.open(self.name, self.worker_id, self.election.token, after)

    def _kv_mark(self) -> tuple[int, ...]:
        worker: Worker | None = self._workers.get(self.worker_id)
        return () if worker is None else worker.kv.mark()


class _Live(NamedTuple):
    """A live batch as it came. Lifetime: call."""

    seq: int
    digest: int
    payload: bytes


def _live(fact: KvEvents | ReplayEnd) -> _Live | None:
    if isinstance(fact, ReplayEnd) or fact.source != "live":
        return None
    payload = fact.events.payload if isinstance(fact.events, WireEvents) else None
    return None if payload is None else _Live(fact.seq, fact.digest, payload)


def _in_order(seq: int, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """A batch of this number went on from what was known, by marks of that."""
    return before[:1] == (seq,) and bool(before[-1]) and after[:1] == (seq + 1,)


@dataclass(slots=True)
class KvHeardCounters:
    """Of all workers there ever were. Counts only ever grow. Lifetime: process."""

    batches: int = 0
    copies: int = 0
    gaps: int = 0
    refused: int = 0

    def add(self, heard: Heard) -> None:
        """Count what one worker's events did."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(heard, field.name))


class KvFan:
    """Lifetime: process. Sans-I/O; `dump` makes bytes of blocks."""

    def __init__(
        self,
        identity: str,
        workers: WorkerTable,
        tell: Callable[[Fact], None],
        on_news: Callable[[], None],
        dump: Dump | None = None,
    ) -> None:
        """`identity`: what peers know us by; `tell` hands the core a fact; `on_news`: there is
        something to fetch again.
        """
        dump, credit = dump or _dump_now, CopyCredit()
        self.identity = identity
        self.voice = KvVoice(workers, on_news, dump, credit)
        self.lender = KvLender(self._own, credit, on_news, dump)
        self.borrower = KvBorrower(on_news)
        self.borrowed = 0  # copies that the core went on from
        self.connected = False
        self._names = Names(workers)
        self._workers, self._tell, self._on_news = workers, tell, on_news
        self._leases: Leases | None = None
        self._lease_s = 0.0
        self._claims: dict[str, Claim] = {}  # by the worker's name
        self._elections: dict[str, Election] = {}  # by address
        self._peers: frozenset[str] = frozenset()
        self._gone = KvHeardCounters()

    def stand(self, leases: Leases, lease_s: float) -> None:
        """Once, before anything else."""
        self._leases, self._lease_s = leases, lease_s

    def claim(self, worker_id: int, address: str) -> Claim:
        """Our part in who reads this worker's events; it begins with `open`."""
        assert self._leases is not None
        claim = Claim(worker_id, address, self._workers, self.voice, self._tell, self._leases.clock)
        claim.enter, claim.leave = self._enter, self._leave
        return claim

    # --- the exchange's ---------------------------------------------------------------------

    def joined(self, now_s: float) -> None:
        """The link is up."""
        self.connected = True
        self.voice.connect()
        for election in list(self._elections.values()):
            election.joined(now_s)

    def parted(self, now_s: float) -> None:
        """The link is down."""
        self.connected = False
        self.voice.disconnect()
        self.lender.drop()
        self.borrower.part()
        for claim in list(self._claims.values()):
            if not claim.reads:
                claim.heard.silent(now_s)
        for election in list(self._elections.values()):
            election.parted()

    def present(self, peers: Collection[str], now_s: float) -> None:
        """All peers that are there."""
        self._peers = frozenset(peers)
        self.borrower.present(peers)
        self._silence(lambda reader: reader not in self._peers, now_s)

    def missed(self, peer: str, now_s: float) -> None:
        """A message of this peer was lost, or cannot be read."""
        for claim in self._claims.values():
            if claim.heard.reader == peer and not claim.reads:
                claim.heard.behind(now_s)

    def hear(self, peer: str, said: Iterable[KvSaid], now_s: float) -> None:
        """What a peer says; of workers that we do not know in vain."""
        for one in said:
            if isinstance(one, KvAsked):
                if one.peer == self.identity:
                    self.lender.asked(one.worker)
            elif isinstance(one, KvNone) or (isinstance(one, KvCopy) and one.token == UNREAD):
                self.borrower.hear(peer, one, now_s)
            elif (claim := self._claims.get(one.worker)) is None:
                continue
            elif isinstance(one, KvWanted):
                self.voice.wanted(one)
            else:
                if not claim.reads:
                    claim.heard.hear(peer, one, now_s)
                claim.election.outranked(one.token)

    def fetch(self, now_s: float, room_bytes: int) -> tuple[KvSaid, ...]:
        """What there is to say, of about so many bytes."""
        for election in self._elections.values():
            election.consider(now_s, not self._peers, self._lease_s)
        wanted: list[KvSaid] = [*self.borrower.fetch(now_s, room_bytes)]
        for claim in self._claims.values():
            if room_bytes <= 0:
                break
            if not claim.reads and (one := claim.heard.wanted(now_s)) is not None:
                wanted.append(one)
                room_bytes -= size_of(one)
        told = self.voice.fetch(now_s, room_bytes)
        lent = self.lender.fetch(now_s, room_bytes - sum(map(size_of, told)))
        return (*wanted, *told, *lent)

    # --- for whoever looks ------------------------------------------------------------------

    def source(self, worker_name: str) -> str | None:
        """Where this worker's events come from, for people; None: it is not claimed here."""
        claim = self._claims.get(worker_name)
        return None if claim is None else claim.source

    def sources(self) -> Counter[str]:
        """How many workers' events are `read` here, `heard` of peers, and `unheard`."""
        found = Counter({"read": 0, "heard": 0, "unheard": 0})
        for claim in self._claims.values():
            found["read" if claim.reads else "heard" if claim.heard.heard else "unheard"] += 1
        return found

    def counters(self) -> KvHeardCounters:
        """What was heard of all peers until now."""
        total = KvHeardCounters(*(getattr(self._gone, field.name) for field in fields(self._gone)))
        for claim in self._claims.values():
            total.add(claim.heard)
        return total

    # --- inside -------------------------------------------------------------------------------

    def _own(self, name: str) -> Worker | None:
        """The worker of this name, where we read it for ourselves alone."""
        worker_id = None if name in self._claims else self._names.worker_id(name)
        return None if worker_id is None else self._workers.get(worker_id)

    def _silence(self, whose: Callable[[str], bool], now_s: float) -> None:
        for claim in self._claims.values():
            reader = claim.heard.reader
            if reader is not None and whose(reader) and not claim.reads:
                claim.heard.silent(now_s)

    def _enter(self, claim: Claim) -> Election:
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

    def _leave(self, claim: Claim) -> None:
        del self._claims[claim.name]
        self._gone.add(claim.heard)
        election = self._elections[claim.address]
        election.candidates.remove(claim)
        if not election.candidates:
            del self._elections[claim.address]
            election.close()


def _dump_now(blocks: FrozenBlocks, done: Callable[[bytes], None]) -> None:
    done(blocks.dump())


log = logging.getLogger(__name__)

_LINK_S = 1.0  # for the link to come up, once
_COPY_S = 10.0  # for a copy; live batches are kept meanwhile
_CATCH_UP_S = 0.25  # for our own events to come as far as the peer's had
_LOOK_S = 0.01
_TRIES = 3  # a copy that ends before the first batch that came to us is proven by none


class Borrowing:
    """Lifetime: process; `tell` hands the core a fact."""

    def __init__(
        self,
        fan: KvFan,
        workers: WorkerTable,
        tell: Callable[[Fact], None],
        clock: Callable[[], float],
    ) -> None:
        self._fan, self._workers, self._tell, self._clock = fan, workers, tell, clock
        self._is_new = True  # the link may not be up only because it was not tried yet

    async def borrow(self, worker_id: int, live_seq: Callable[[], int]) -> bool:
        """Tell the core what a peer knows of this worker; False: nobody knows it, or it is not
        proven. `live_seq`: number of the latest batch that came to us live, -1 without any.
        """
        await self._linked()
        for _ in range(_TRIES):
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

    async def _copy(self, name: str) -> Borrowed | None:
        answer: asyncio.Future[Borrowed | None] = asyncio.get_running_loop().create_future()

        def done(copy: Borrowed | None) -> None:
            if not answer.done():
                answer.set_result(copy)

        wish = self._fan.borrower.want(name, done)
        try:
            async with asyncio.timeout(_COPY_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._fan.borrower.drop(wish)

    @staticmethod
    async def _until(reached: Callable[[], bool], most_s: float) -> None:
        for _ in range(round(most_s / _LOOK_S)):
            if reached():
                return
            await asyncio.sleep(_LOOK_S)

    def _take(self, worker_id: int, copy: Borrowed) -> bool:
        worker = self._workers.get(worker_id)
        if worker is None or not worker.kv.goes_on_from(copy.next_seq, copy.digest):
            return False
        refused = worker.kv.counters.refused_copies
        # Whatever came before `next_seq` came live to that peer, or might have: a lower number
        # from now on, unless it waits here, tells of another life of the publisher.
        where = copy.next_seq, copy.next_seq - 1, copy.digest
        how = copy.exact, copy.turned_over
        self._tell(KvCopied(self._clock(), worker_id, *where, *how, copy.blocks))
        if worker.kv.counters.refused_copies > refused:
            return False
        self._fan.borrowed += 1
        log.info("worker %d: its cache as of batch %d is a peer's", worker_id, copy.next_seq - 1)
        return True


def _is_past(live_seq: Callable[[], int], seq: int) -> bool:
    return live_seq() >= seq

"""KV events that one replica reads, known to all: who reads, what it tells, what is heard of it.

The reader tells its peers each batch that its core applied in order. So they apply the same ones to
the same state, whatever the reader went through, and go on from there with the engine's numbers
when one of them reads next: where a reader took events along when it died, the numbers show a hole.
What changed in another way, a gap that was given up, a snapshot, travels as a copy of all that the
reader knows, on demand.

Workers whose events each replica reads for itself are told of only to one that asks: it has begun
just now, or missed what the engine cannot tell again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields

from kvkernels import FrozenBlocks
from policies.facts import Fact
from router.core.workers import Worker, WorkerTable
from router.replicas.claim import Claim
from router.replicas.election import Election
from router.replicas.kv_borrower import KvBorrower
from router.replicas.kv_credit import CopyCredit
from router.replicas.kv_heard import Heard
from router.replicas.kv_lender import KvLender
from router.replicas.kv_messages import UNREAD, KvAsked, KvCopy, KvNone, KvSaid, KvWanted, size_of
from router.replicas.kv_voice import Dump, KvVoice
from router.replicas.lease import MOST_KEY_CHARS, MOST_LEASES, Leases
from router.replicas.names import Names


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

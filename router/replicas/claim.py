"""One worker's events that one replica alone can have: read here and told, or heard of a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policies.facts import Fact, KvEvents, ReplayEnd
from router.core.wire_events import WireEvents
from router.core.workers import Worker, WorkerTable
from router.replicas.election import Election
from router.replicas.kv_heard import Heard
from router.replicas.kv_outlet import NOWHERE
from router.replicas.kv_voice import KvVoice


class Claim:
    """A worker's events, as `router.events.elected` wants them. Lifetime: feed."""

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

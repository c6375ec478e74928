"""Receives the peers' messages about their requests, and about the KV events that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from kvkernels import EventBatch
from policies.facts import (
    UNIDENTIFIED,
    Arrival,
    Finish,
    Identity,
    KvCopied,
    KvEvents,
    KvHeard,
    PeerDispatched,
    PeerEnded,
    PeerFact,
    PeerFirstToken,
    PeerProgress,
)
from router.core.workers.kv_events import WireEvents
from router.core.workers.snapshot import decode_snapshot
from router.core.workers.table import Worker, WorkerTable
from router.replicas.messages import (
    HASH_TYPE,
    Begun,
    Ended,
    Grew,
    KvBatch,
    KvHead,
    KvSnapshot,
    KvWanted,
    Message,
    Pieces,
    RequestEvent,
    Sent,
)
from router.replicas.publisher import NOWHERE, Place


class Names:
    """Finds the ids of workers by their names, for the latest version of the worker table.
    Lifetime: process.
    """

    def __init__(self, workers: WorkerTable) -> None:
        self._workers = workers
        self._version = -1
        self._ids: dict[str, int] = {}

    def worker_id(self, name: str) -> int | None:
        """Return the id of the worker of this name, or None if there is none."""
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._ids = {worker.facts.name: worker.worker_id for worker in self._workers}
        return self._ids.get(name)


_MAX_REQUESTS = 1 << 17  # most requests of one peer that are tracked one by one
_UNKNOWN = 0  # number of a request at an unknown worker


@dataclass(slots=True)
class SubscriberCounters:
    """The counts of messages from one peer, or from all peers so far; they only grow. Lifetime:
    peer, or process.
    """

    messages: int = 0
    events: int = 0
    gaps: int = 0  # messages missed
    miscounted: int = 0  # messages after which it has more or fewer requests than we know of
    unknown_workers: int = 0  # requests at workers that this replica does not know
    beyond: int = 0  # requests for which there was no room

    def add(self, other: SubscriberCounters) -> None:
        """Add the counts of `other`."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class RequestSubscriber:
    """Turns one peer's request events into facts, in which the requests have numbers of this
    router. Lifetime: peer.

    `report_fact` is called with each fact; `worker_id` finds a worker by its name; `room` returns
    whether one more request may be kept, once all facts so far were processed.
    """

    def __init__(
        self,
        worker_id: Callable[[str], int | None],
        room: Callable[[], bool],
        numbers: Iterator[int],
        report_fact: Callable[[PeerFact], None],
    ) -> None:
        self.counters = SubscriberCounters()
        self.in_sync = False  # no message was missed since the last full report
        self.last_message_s = float("-inf")
        self._worker_id, self._room, self._numbers = worker_id, room, numbers
        self._report_fact = report_fact
        self._next_number: int | None = None
        self._ours: dict[int, int] = {}  # its number of a request -> ours
        self._worker: dict[int, str] = {}  # its number of a request -> where that is
        self._waiting: set[int] = set()  # of ours: before their first tokens
        self._retold: set[int] | None = None  # its numbers, in the retelling under way

    def __len__(self) -> int:
        """Return the number of the peer's requests at workers that this router knows."""
        return sum(number != _UNKNOWN for number in self._ours.values())

    def on_message(self, message: Message, now_s: float) -> None:
        """Pass the facts in a peer's message to the core."""
        self.last_message_s = now_s
        self.counters.messages += 1
        if message.number != self._next_number:
            self.counters.gaps += self._next_number is not None
            self.in_sync, self._retold = False, None
        self._next_number = message.number + 1
        if message.retelling in ("first", "only"):
            self._retold = set()
        self.counters.events += len(message.events)
        for one in message.events:
            self._understand(one, now_s)
        if message.retelling in ("last", "only") and self._retold is not None:
            self._end_all_but(self._retold, now_s)
            self._retold, self.in_sync = None, True
        if self.in_sync and message.open_requests != len(self._ours):
            self.counters.miscounted += 1
            self.in_sync = False

    def end_all(self, now_s: float) -> None:
        """End all of the peer's requests, because the peer is gone."""
        self.in_sync = False
        self._end_all_but(set(), now_s)

    def stale(self, now_s: float) -> None:
        """Note that the peer's messages no longer arrive.

        Its requests still count as load of their workers. Their prompts count as computed, because
        a queue that never shrinks would be a worse guess than none.
        """
        self.in_sync, self._next_number, self._retold = False, None, None
        for number in sorted(self._waiting, reverse=True):
            self._report_fact(PeerFirstToken(now_s, number))
        self._waiting.clear()

    def _understand(self, one: RequestEvent, now_s: float) -> None:
        if self._retold is not None:
            self._retold.add(one.request_id)
        if type(one) is Sent:
            self._sent(one, now_s)
        elif type(one) is Ended:
            self._end(one.request_id, now_s, one)
        elif (number := self._ours.get(one.request_id, _UNKNOWN)) == _UNKNOWN:
            return
        elif type(one) is Begun:
            self._waiting.discard(number)
            self._report_fact(PeerFirstToken(now_s, number))
        elif type(one) is Grew:
            self._report_fact(PeerProgress(now_s, number, one.output_tokens))

    def _sent(self, sent: Sent, now_s: float) -> None:
        known = self._ours.get(sent.request_id)
        if known is not None:
            if self._retold is not None and self._worker[sent.request_id] == sent.worker:
                return
            self._end(sent.request_id, now_s)  # the peer sent it again, and its end was missed
        if len(self._ours) >= _MAX_REQUESTS:
            self.counters.beyond += 1
            return
        self._worker[sent.request_id] = sent.worker
        worker_id = self._worker_id(sent.worker)
        if worker_id is None or not self._room():
            self.counters.unknown_workers += worker_id is None
            self.counters.beyond += worker_id is not None
            self._ours[sent.request_id] = _UNKNOWN
            return
        number = self._ours[sent.request_id] = next(self._numbers)
        self._waiting.add(number)
        arrival, uncached = _arrival(sent, number, now_s), max(sent.uncached_tokens, 1)
        late = self._retold is not None
        self._report_fact(PeerDispatched(now_s, arrival, worker_id, uncached, sent.standing, late))

    def _end(self, request_id: int, now_s: float, ended: Ended | None = None) -> None:
        self._worker.pop(request_id, None)
        number = self._ours.pop(request_id, _UNKNOWN)
        self._waiting.discard(number)
        if number != _UNKNOWN:
            finish = None if ended is None else _finish(ended, number, now_s)
            self._report_fact(PeerEnded(now_s, number, finish))

    def _end_all_but(self, kept: set[int], now_s: float) -> None:
        for request_id in [one for one in self._ours if one not in kept]:
            self._end(request_id, now_s)


def _arrival(sent: Sent, number: int, now_s: float) -> Arrival:
    identity = UNIDENTIFIED
    if sent.group is not None or sent.parent is not None or sent.final:
        identity = Identity(group=sent.group, parent=sent.parent, final=sent.final)
    return Arrival(
        now_s=now_s,
        request_id=number,
        model=sent.model,
        prompt_tokens=max(sent.prompt_tokens, 1),
        chains={size: np.frombuffer(chain, HASH_TYPE) for size, chain in sent.chains},
        approximate=sent.approximate,
        session=sent.session,
        tenant=sent.tenant,
        stream=sent.stream,
        longest_prompt_tokens=sent.longest_prompt_tokens,
        weight=sent.weight,
        identity=identity,
    )


def _finish(ended: Ended, number: int, now_s: float) -> Finish | None:
    if not ended.answered:
        return None
    return Finish(now_s, number, ended.prompt_tokens, ended.cached_tokens, ended.output_tokens)


_ASK_AGAIN_S = 0.5
_REFUSED_S = 10.0  # pause after a snapshot that could not be used, seconds

KvFact = KvEvents | KvCopied | KvHeard


class KvSubscriber:
    """The KV events of one worker, as a peer that reads them sends them. Lifetime: as long as this
    replica wants the events.

    `place`, a token and a batch number, is the place up to which the core knows the worker's cache;
    number 0 means that it knows nothing. `in_sync` is True if no batch was missed since;
    `is_live` is True if the reading peer is running, too.
    """

    def __init__(
        self, name: str, worker: Callable[[], Worker | None], report_fact: Callable[[KvFact], None]
    ) -> None:
        """Start without a place. `worker` returns the worker in the core's table; `report_fact`
        passes a fact to the core.
        """
        self.name = name
        self.place: Place = NOWHERE
        self.in_sync = False
        self.applied = False  # something that was told stands in the core
        self.reader: str | None = None  # the replica that was heard last
        self.gaps = self.snapshots = self.batches = self.refused = 0
        self._worker, self._report_fact = worker, report_fact
        self._reported_heard = True  # as last told to the core
        self._pieces = Pieces()
        self._requested_s = float("-inf")  # not to be asked before

    @property
    def is_live(self) -> bool:
        """True if no batch was missed and the reading peer is running."""
        return self.in_sync and self.reader is not None

    def next_request(self, now_s: float) -> KvWanted | None:
        """Return the message with which to ask the reading peer for events now, or None."""
        if self.is_live or now_s < self._requested_s:
            return None
        self._requested_s = now_s + _ASK_AGAIN_S
        return KvWanted(self.name, *self.place)

    def behind(self, now_s: float) -> None:
        """Note that a batch of events was missed."""
        self.gaps += self.in_sync
        self.in_sync = False
        self._requested_s = min(self._requested_s, now_s)
        self.update(now_s)

    def lost(self, now_s: float) -> None:
        """Note that the core's state of the worker's cache no longer belongs to any place."""
        self._lose((self.place[0], 0))
        self.behind(now_s)

    def follow(self, place: Place, now_s: float) -> None:
        """Note that this replica read the events up to `place`, and that another replica continues
        from there.
        """
        self.place, self.in_sync, self._reported_heard = place, True, True
        self.applied = True
        self.silent(now_s)

    def begin_reading(self, now_s: float) -> None:
        """Note that this replica reads the events itself now. No event is known to be missing,
        because a gap would show in the sequence numbers.
        """
        worker = self._worker()
        if worker is not None:
            self._report_reachability(now_s, worker)

    def silent(self, now_s: float) -> None:
        """Note that the reading peer no longer answers."""
        self.reader = None
        self._pieces.clear()
        self._requested_s = now_s
        self.update(now_s)

    def on_message(self, peer: str, message: KvHead | KvBatch | KvSnapshot, now_s: float) -> None:
        """Process a message of a peer that reads the events, which may be a new reader or a former
        one.
        """
        token = self.place[0]
        if message.token < token:
            return
        was_heard = self.is_live
        if type(message) is KvHead:
            self._head(message)
        elif message.token > token:
            self._lose((message.token, 0))
        if peer != self.reader:
            self.reader = peer
            self._pieces.clear()
        if type(message) is KvBatch:
            self._batch(message, now_s)
        elif type(message) is KvSnapshot:
            self._snapshot(message, now_s)
        if was_heard and not self.is_live:
            self.gaps += 1
            self._requested_s = min(self._requested_s, now_s)
        self.update(now_s)

    def update(self, now_s: float) -> None:
        """Report to the core whether this worker's events reach this replica, if that changed."""
        if self.is_live != self._reported_heard:
            self._reported_heard = self.is_live
            worker = self._worker()
            if worker is not None:
                self._report_fact(KvHeard(now_s, worker.worker_id, self.is_live))

    # --- inside -------------------------------------------------------------------------------

    def _head(self, head: KvHead) -> None:
        token, number = self.place
        if head.token > token:
            if self.in_sync and self.place == (head.after_token, head.after_number):
                number = head.first
            else:
                self._lose((head.token, 0))
                return
            self.place = head.token, number
        self.in_sync = head.number == number or (self.in_sync and head.number < number)

    def _lose(self, place: Place) -> None:
        self.place, self.in_sync = place, False

    def _batch(self, message: KvBatch, now_s: float) -> None:
        token, number = self.place
        if not self.in_sync or message.number < number:
            return
        if message.number > number:
            self.in_sync = False
            return
        body, worker = self._pieces.add("batch", message), self._worker()
        if body is None or worker is None:
            return
        try:
            events = WireEvents(EventBatch(body), worker.facts.models[0], len(body))
        except ValueError:
            self._lose((token, 0))
            return
        self.place = token, number + 1
        self.batches += 1
        self._report_reachability(now_s, worker)
        self._report_fact(
            KvEvents(now_s, worker.worker_id, message.seq, events, "live", message.digest)
        )

    def _snapshot(self, message: KvSnapshot, now_s: float) -> None:
        self.in_sync = self.in_sync and message.number <= self.place[1]
        if self.in_sync:
            return
        self._requested_s = max(self._requested_s, now_s + _ASK_AGAIN_S)  # it is on its way
        body, worker = self._pieces.add("snapshot", message), self._worker()
        if body is None or worker is None:
            return
        # Before the core gets the snapshot, because it requests missing events at once.
        self.place, self.in_sync, self.applied = (message.token, message.number), True, True
        self._reported_heard = True
        self.snapshots += 1
        if not self._taken(body, worker, now_s):
            self.refused += 1
            self._lose((message.token, 0))
            self._requested_s = now_s + _REFUSED_S

    def _taken(self, body: bytes, worker: Worker, now_s: float) -> bool:
        """Pass a snapshot to the core. Return whether the core continues from it."""
        try:
            snapshot = decode_snapshot(body)
        except ValueError:
            return False
        refused = worker.kv.counters.refused_copies
        self._report_fact(KvCopied(now_s, worker.worker_id, snapshot))
        return worker.kv.counters.refused_copies == refused

    def _report_reachability(self, now_s: float, worker: Worker) -> None:
        if not self._reported_heard:
            self._reported_heard = True
            self._report_fact(KvHeard(now_s, worker.worker_id, True))

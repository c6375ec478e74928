"""Publishes this replica's own requests to its peers, and the KV events that it reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice

from msgspec.structs import replace

from policies.facts import Finish
from router.core.core import RequestListener
from router.core.placement.pending import Pending
from router.core.workers.ledger import Charge, ChargeKey
from router.core.workers.snapshot import FrozenCache
from router.core.workers.table import Worker, WorkerTable
from router.keys.quota import SharedUse
from router.replicas.messages import (
    HASH_TYPE,
    MAX_BATCH_PIECES,
    MAX_CHAIN_BLOCKS,
    MAX_TOKENS,
    VERSION,
    Begun,
    Ended,
    Grew,
    KvBatch,
    KvHead,
    KvMessage,
    KvSnapshot,
    KvWanted,
    Message,
    RequestEvent,
    Retelling,
    Sent,
    Used,
    encoded,
    pieces_of,
    size_of,
    snapshot_pieces,
)

_BYTES_PER_S = 32 << 20
_BURST_BYTES = 512 << 10


class SnapshotBudget:
    """Limits how fast snapshots are sent, so that they leave room for other messages. Lifetime:
    process.
    """

    def __init__(self) -> None:
        self._left_bytes, self._earned_s = 0.0, 0.0

    @property
    def is_spent(self) -> bool:
        """True if no snapshot bytes may be sent now."""
        return self._left_bytes <= 0

    def earn(self, now_s: float) -> None:
        """Allow the further bytes that may be sent for the time that has passed since the last
        call.
        """
        earned = (now_s - self._earned_s) * _BYTES_PER_S
        self._left_bytes = min(self._left_bytes + earned, _BURST_BYTES)
        self._earned_s = now_s

    def spend(self, size_bytes: int) -> None:
        """Subtract the bytes of a snapshot that are sent now."""
        self._left_bytes -= size_bytes


_MAX_QUEUED_BYTES = 8 << 20  # when more bytes of events wait, peers get a snapshot instead

Place = tuple[int, int]  # token and number: all batches before it are known
NOWHERE: Place = (0, 0)


class QueuedSnapshot:
    """The place of a snapshot in a worker's queue of batches; its pieces are set later. Lifetime:
    until it is sent.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.pieces: deque[KvSnapshot] | None = None


class WorkerPublisher:
    """The queue of messages about one worker's KV events. Lifetime: while this replica reads
    them.
    """

    def __init__(self, worker: str, worker_id: int, token: int, first: int, after: Place) -> None:
        """Start with an empty queue. `after` is the place, a token and a batch number, up to which
        this replica knows the worker's cache; `NOWHERE` if it knows nothing.
        """
        self.worker, self.worker_id, self.token = worker, worker_id, token
        self.number = first  # of the next batch
        self._first, self._after = first, after
        self._head_due = True
        self._queue: deque[KvBatch | QueuedSnapshot] = deque()
        self._size_bytes = 0

    @property
    def has_snapshot(self) -> bool:
        """True if a snapshot is in the queue."""
        return any(type(one) is QueuedSnapshot for one in self._queue)

    @property
    def ready(self) -> bool:
        """True if a message is ready to send."""
        if self._head_due:
            return True
        first = self._queue[0] if self._queue else None
        return first is not None and not (type(first) is QueuedSnapshot and first.pieces is None)

    @property
    def snapshot_next(self) -> bool:
        """True if the next message is a piece of a snapshot."""
        return not self._head_due and bool(self._queue) and type(self._queue[0]) is QueuedSnapshot

    def send_head_next(self) -> None:
        """Make a `KvHead` the next message, because a peer may not know the current batch
        number.
        """
        self._head_due = True

    def jump(self) -> None:
        """Skip a batch number, because the worker's cache changed in a way that only a snapshot can
        describe.
        """
        self.number += 1
        self._head_due = True

    def drop(self) -> None:
        """Remove all messages from the queue."""
        self._queue.clear()
        self._size_bytes = 0
        self._head_due = True

    def batch(self, seq: int, digest: int, payload: bytes) -> bool:
        """Queue a batch that this replica applied in order. Return False if there is no room, so
        that peers need a snapshot.
        """
        pieces = pieces_of(payload)
        if len(pieces) > MAX_BATCH_PIECES or self._size_bytes + len(payload) > _MAX_QUEUED_BYTES:
            self.drop()
            return False
        number, self.number = self.number, self.number + 1
        for at, body in enumerate(pieces):
            place = self.worker, self.token, number
            self._queue.append(KvBatch(*place, seq, digest, at, len(pieces), body))
        self._size_bytes += len(payload)
        return True

    def begin_snapshot(self) -> QueuedSnapshot:
        """Queue a snapshot after all other messages; `fill` sets its bytes later."""
        queued = QueuedSnapshot(self.number)
        self._queue.append(queued)
        return queued

    def fill(self, queued: QueuedSnapshot, body: bytes) -> bool:
        """Set the bytes of a queued snapshot. Return False if they are too many to send."""
        queued.pieces = snapshot_pieces(self.worker, self.token, queued.number, body)
        if queued.pieces is None and queued in self._queue:
            self._queue.remove(queued)
        return queued.pieces is not None

    def next(self) -> KvMessage:
        """Remove and return the next message. It may only be called if `ready` is True."""
        if self._head_due:
            self._head_due = False
            return self._head()
        first = self._queue[0]
        if type(first) is QueuedSnapshot:
            assert first.pieces
            piece = first.pieces.popleft()
            if not first.pieces:
                self._queue.popleft()
            return piece
        assert type(first) is KvBatch
        self._queue.popleft()
        self._size_bytes -= len(first.body)
        return first

    def _head(self) -> KvHead:
        """Return a `KvHead` with the number of the next batch that will be sent."""
        waiting = next((one.number for one in self._queue), self.number)
        return KvHead(self.worker, self.token, waiting, self._first, *self._after)


Dump = Callable[[FrozenCache, Callable[[bytes], None]], None]  # calls back with the snapshot


@dataclass(slots=True)
class KvPublisherCounters:
    """The counts of KV events published to peers; they only grow. Lifetime: process."""

    batches: int = 0  # batches published
    snapshots: int = 0  # begun
    jumps: int = 0  # changes that only a snapshot can carry


class KvPublisher:
    """Publishes the KV events that this replica reads, with one queue for each worker. Lifetime:
    process.
    """

    def __init__(
        self, workers: WorkerTable, on_news: Callable[[], None], dump: Dump, budget: SnapshotBudget
    ) -> None:
        """Start with no worker. `dump` encodes a cache as bytes, either at once or in a thread."""
        self.counters = KvPublisherCounters()
        self._workers, self._on_news = workers, on_news
        self._dump, self._budget = dump, budget
        self._streams: dict[str, WorkerPublisher] = {}
        self._ready: dict[str, None] = {}  # workers that may have a message, in turn
        self._asked: dict[str, None] = {}  # those of which a snapshot is wanted, in turn
        self._dumping: WorkerPublisher | None = None  # one at a time
        self._connected = False
        self._latest = 0  # number of any stream, so that no number is used twice

    def __len__(self) -> int:
        return len(self._streams)

    def stream(self, worker: str) -> WorkerPublisher | None:
        """Return the queue of a worker, or None if this replica does not read its events."""
        return self._streams.get(worker)

    def open(self, worker: str, worker_id: int, token: int, after: Place = NOWHERE) -> None:
        """Begin to publish a worker's events. This replica knows the worker's cache up to the place
        `after`.
        """
        first = self._latest = max(self._latest, after[1]) + 1
        self._streams[worker] = WorkerPublisher(worker, worker_id, token, first, after)
        self._news(worker)

    def close(self, worker: str) -> Place:
        """Stop publishing a worker's events. Return the place that was reached, a token and a batch
        number.
        """
        stream = self._streams.pop(worker)
        self._latest = max(self._latest, stream.number)
        self._ready.pop(worker, None)
        self._asked.pop(worker, None)
        if self._dumping is stream:
            self._dumping = None
        return stream.token, stream.number

    def applied(self, worker: str, seq: int, digest: int, payload: bytes) -> None:
        """Publish a batch that the core applied in order."""
        stream = self._streams[worker]
        if not self._connected:
            stream.number += 1
        elif stream.batch(seq, digest, payload):
            self._news(worker)
        else:
            self._dumping = None if self._dumping is stream else self._dumping
            self.jumped(worker)

    def jumped(self, worker: str) -> None:
        """Note that this worker's cache changed in another way than by a batch, so that peers need
        a snapshot.
        """
        self.counters.jumps += 1
        self._streams[worker].jump()
        self._news(worker)

    def connect(self) -> None:
        """Note that the connection to Redis works, and that peers must learn the current batch
        numbers.
        """
        self._connected = True
        self._drop()

    def disconnect(self) -> None:
        """Note that the connection to Redis is lost."""
        self._connected = False
        self._drop()

    def on_request(self, wanted: KvWanted) -> None:
        """Process a peer's request for the events of a worker from some batch on."""
        stream = self._streams.get(wanted.worker)
        if stream is None or not self._connected or stream.has_snapshot:
            return
        if (wanted.token, wanted.number) == (stream.token, stream.number):
            stream.send_head_next()
        else:
            self._asked[wanted.worker] = None
        self._news(wanted.worker)

    def fetch(self, now_s: float, room_bytes: int) -> tuple[KvMessage, ...]:
        """Return the next messages to send, about `room_bytes` bytes of them. Workers
        take turns.
        """
        if not (self._ready or self._asked):
            return ()
        self._begin_snapshot()
        self._budget.earn(now_s)
        messages: list[KvMessage] = []
        waiting: list[str] = []  # until the budget has room
        while self._ready and room_bytes > 0:
            worker = next(iter(self._ready))
            del self._ready[worker]
            stream = self._streams[worker]
            if not stream.ready:
                continue
            if stream.snapshot_next and self._budget.is_spent:
                waiting.append(worker)
                continue
            one = stream.next()
            self._count(one, stream)
            room_bytes -= size_of(one)
            messages.append(one)
            self._ready[worker] = None
        self._ready.update(dict.fromkeys(waiting))
        if self._ready or self._asked:
            self._on_news()
        return tuple(messages)

    # --- inside -------------------------------------------------------------------------------

    def _begin_snapshot(self) -> None:
        """Begin the snapshot of the first worker that a peer asked for and whose cache is
        consistent now.
        """
        if self._dumping is not None:
            return
        for name in list(self._asked):
            stream = self._streams[name]
            worker = self._workers.get(stream.worker_id)
            frozen = worker.kv.frozen() if worker is not None and worker.kv.settled else None
            if frozen is None:
                continue
            del self._asked[name]
            self._dumping = stream
            self.counters.snapshots += 1
            self._dump(frozen, partial(self._filled, stream, stream.begin_snapshot()))
            return

    def _filled(self, stream: WorkerPublisher, queued: QueuedSnapshot, body: bytes) -> None:
        if not stream.fill(queued, body) and self._dumping is stream:
            self._dumping = None
        if self._streams.get(stream.worker) is stream:
            self._news(stream.worker)

    def _count(self, one: KvMessage, stream: WorkerPublisher) -> None:
        if type(one) is KvBatch:
            self.counters.batches += one.piece == 0
        elif type(one) is KvSnapshot:
            self._budget.spend(len(one.body))
            if one.piece == one.pieces - 1 and self._dumping is stream:
                self._dumping = None

    def _news(self, worker: str) -> None:
        if self._connected:
            first = not self._ready
            self._ready[worker] = None
            if first:
                self._on_news()

    def _drop(self) -> None:
        self._asked.clear()
        self._dumping = None
        self._ready = dict.fromkeys(self._streams) if self._connected else {}
        for stream in self._streams.values():
            stream.drop()
        if self._ready:
            self._on_news()


_MESSAGE_BYTES = 128 << 10  # of events, by a rough count; one alone may have twice as many
_PLAIN_BYTES = 160  # approximate size of an event without its chains
_GROWTH_TOKENS = 64  # growth of an answer from which it is reported, tokens
_SILENT_S = 0.5  # without a message, after which an empty one shows that none was missed
_RESEND_S = 0.2  # least time between two full reports, each of which lists all open requests
_MAX_QUEUED = 200_000  # most unsent events; a full report replaces more


@dataclass(slots=True)
class _OpenRequest:
    """A request of this router, or one leg of it, that a worker is processing. Lifetime:
    dispatch.
    """

    sent: Sent  # without its chains
    begun: bool = False
    told_tokens: int = 0
    output_tokens: int = 0


FetchKv = Callable[[float, int], tuple[KvMessage, ...]]


class RequestPublisher(RequestListener):
    """Queues this router's request events and packs them into messages. Lifetime: process."""

    def __init__(self, on_news: Callable[[], None], kv: FetchKv = lambda now_s, room: ()) -> None:
        """Start without a connection. `on_news` is called when there is a message to send again;
        `kv` returns messages about KV events, up to a number of bytes.
        """
        self._on_news, self._kv = on_news, kv
        self.sent_events = 0  # events, so far
        self._open: dict[ChargeKey, _OpenRequest] = {}
        self._numbers = count()  # by which peers know our dispatches
        self._queue: deque[RequestEvent] = deque()
        self._parts: deque[tuple[Retelling, tuple[RequestEvent, ...]]] = deque()
        self._connected = False
        self._retell = False
        self._untold = True  # what happened is told by the next retelling, which nothing precedes
        self._number = 0
        self._told_open = 0  # requests, as whoever heard all of it must count them
        self._sent_s = self._retold_s = float("-inf")

    # --- what the core tells ----------------------------------------------------------------

    def dispatched(self, pending: Pending, charge: Charge, worker: Worker) -> None:
        arrival = pending.arrival
        chains = tuple(
            (size, chain[:MAX_CHAIN_BLOCKS].astype(HASH_TYPE, copy=False).tobytes())
            for size, chain in arrival.chains.items()
        )
        sent = Sent(
            next(self._numbers),
            worker.facts.name,
            arrival.model,
            arrival.prompt_tokens,
            charge.uncached_tokens,
            arrival.stream,
            arrival.approximate,
            pending.standing,
            arrival.session,
            arrival.tenant,
            arrival.weight,
            arrival.longest_prompt_tokens,
            group=arrival.identity.group,
            parent=arrival.identity.parent,
            final=arrival.identity.final,
        )
        self._open[charge.request_id, charge.leg] = _OpenRequest(sent)
        if self._connected:
            self._queue_event(replace(sent, chains=chains))

    def first_token(self, charge: Charge) -> None:
        one = self._open.get((charge.request_id, charge.leg))
        if one is not None and not one.begun:
            one.begun = True
            if self._connected:
                self._queue_event(Begun(one.sent.request_id))

    def progress(self, charge: Charge, output_tokens: int) -> None:
        one = self._open.get((charge.request_id, charge.leg))
        if one is None:
            return
        one.output_tokens = output_tokens
        if output_tokens - one.told_tokens >= _GROWTH_TOKENS:
            one.told_tokens = output_tokens
            if self._connected:
                self._queue_event(Grew(one.sent.request_id, output_tokens))

    def ended(self, charge: Charge, finish: Finish | None) -> None:
        one = self._open.pop((charge.request_id, charge.leg), None)
        if one is None or not self._connected:
            return
        number = one.sent.request_id
        if finish is None or finish.refused:
            self._queue_event(Ended(number))
            return
        counts = finish.prompt_tokens, finish.cached_tokens, finish.output_tokens
        self._queue_event(Ended(number, True, *map(_tokens, counts)))

    # --- what is fetched --------------------------------------------------------------------

    def connect(self) -> None:
        """Note that the connection to Redis works, and that all open requests must be sent to
        peers.
        """
        self._connected = True
        self._drop_queue()

    def disconnect(self) -> None:
        """Note that the connection to Redis is lost. Open requests are sent again when it works
        again.
        """
        self._connected = False
        self._drop_queue()

    def resend_all(self) -> None:
        """Send all open requests again, because a peer missed a message."""
        self._retell = True

    def message(self, now_s: float, wants: tuple[str, ...], uses: SharedUse) -> bytes | None:
        """Return the next message, or None if there is nothing to send."""
        if not self._connected:
            return None
        due = self._retell and now_s - self._retold_s >= _RESEND_S
        if self._untold or (due and not (self._parts or self._queue)):
            self._untold = self._retell = False
            self._retold_s = now_s
            self._parts.extend(_parts(self._all_open()))
            self._told_open = len(self._open)
        retelling: Retelling = ""
        events: tuple[RequestEvent, ...] = ()
        size_bytes = 0
        if self._parts:  # later events follow the full report
            retelling, events = self._parts.popleft()
            size_bytes = len(events) * _PLAIN_BYTES
        elif self._queue:
            events, size_bytes = self._oldest()
        kv = self._kv(now_s, _MESSAGE_BYTES - size_bytes)
        used = uses.all() if retelling in ("first", "only") else uses.changed()
        has_news = events or retelling or wants or used or kv
        if not has_news and now_s - self._sent_s < _SILENT_S:
            return None
        self._sent_s = now_s
        self.sent_events += len(events)
        number, self._number = self._number, self._number + 1
        told_use = tuple(Used(*use) for use in used)
        return encoded(
            Message(VERSION, number, self._told_open, retelling, wants, events, told_use, kv)
        )

    # --- inside -----------------------------------------------------------------------------

    def _queue_event(self, one: RequestEvent) -> None:
        if len(self._queue) >= _MAX_QUEUED:
            self._drop_queue()
        elif not self._untold:
            self._queue.append(one)
            if len(self._queue) == 1:
                self._on_news()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._parts.clear()
        self._untold = True

    def _oldest(self) -> tuple[tuple[RequestEvent, ...], int]:
        """Remove the oldest events from the queue, as many as one message holds, but at least one.
        Return them and their size in bytes.
        """
        queue, chosen, size_bytes = self._queue, [], 0
        while queue and size_bytes < _MESSAGE_BYTES:
            one = queue.popleft()
            chosen.append(one)
            size_bytes += _size_bytes(one)
            if type(one) is Sent:
                self._told_open += 1
            elif type(one) is Ended:
                self._told_open -= 1
        return tuple(chosen), size_bytes

    def _all_open(self) -> Iterator[RequestEvent]:
        for one in self._open.values():
            yield one.sent
            if one.begun:
                yield Begun(one.sent.request_id)
            if one.output_tokens:
                one.told_tokens = one.output_tokens
                yield Grew(one.sent.request_id, one.output_tokens)


def _parts(events: Iterator[RequestEvent]) -> list[tuple[Retelling, tuple[RequestEvent, ...]]]:
    """Divide the events among messages; there is one message even without events."""
    cuts: list[tuple[RequestEvent, ...]] = []
    while cut := tuple(islice(events, _MESSAGE_BYTES // _PLAIN_BYTES)):
        cuts.append(cut)
    if len(cuts) < 2:
        return [("only", cuts[0] if cuts else ())]
    between: list[tuple[Retelling, tuple[RequestEvent, ...]]] = [
        ("more", cut) for cut in cuts[1:-1]
    ]
    return [("first", cuts[0]), *between, ("last", cuts[-1])]


def _size_bytes(one: RequestEvent) -> int:
    chains = one.chains if type(one) is Sent else ()
    return _PLAIN_BYTES + sum(len(chain) for _, chain in chains)


def _tokens(count: int | None) -> int | None:
    """Return the count limited to the range that a message allows, because a worker may report any
    number.
    """
    return None if count is None else min(max(count, 0), MAX_TOKENS)

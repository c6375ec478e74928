"""What this replica publishes to its peers: its own requests, and the KV events that it reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

from msgspec.structs import replace

from kvkernels import FrozenBlocks
from policies.facts import Finish
from router.core.hold_queue import Pending
from router.core.kv_state import CopiedStream
from router.core.workers import Worker, WorkerTable
from router.keys.quota import Use
from router.replicas.messages import (
    HASH_TYPE,
    MAX_BATCH_PIECES,
    MAX_CHAIN_BLOCKS,
    MAX_COPY_PIECES,
    MAX_TOKENS,
    VERSION,
    Begun,
    Ended,
    Grew,
    Happened,
    KvBatch,
    KvCopy,
    KvHead,
    KvSaid,
    KvWanted,
    Message,
    Retelling,
    Sent,
    Used,
    encoded,
    pieces_of,
    size_of,
)

_BYTES_PER_S = 32 << 20
_BURST_BYTES = 512 << 10


class CopyCredit:
    """One for all copies that this replica tells. Lifetime: process."""

    def __init__(self) -> None:
        self._left_bytes, self._earned_s = 0.0, 0.0

    @property
    def is_spent(self) -> bool:
        """Nothing more may be told for now."""
        return self._left_bytes <= 0

    def earn(self, now_s: float) -> None:
        """For the time that has passed."""
        earned = (now_s - self._earned_s) * _BYTES_PER_S
        self._left_bytes = min(self._left_bytes + earned, _BURST_BYTES)
        self._earned_s = now_s

    def spend(self, size_bytes: int) -> None:
        """So much of a copy is told."""
        self._left_bytes -= size_bytes


_QUEUED_BYTES = 8 << 20  # beyond it those who listen get a copy instead

Place = tuple[int, int]  # token and number: what all before this batch have told
NOWHERE: Place = (0, 0)


class Copying:
    """A copy among what is to be said. Its place is kept until it has bytes. Lifetime: copy."""

    def __init__(self, number: int, stream: CopiedStream) -> None:
        self.number = number
        self.stream = stream
        self.pieces: deque[KvCopy] | None = None


class Outlet:
    """Lifetime: from when we begin to read until we end."""

    def __init__(self, worker: str, worker_id: int, token: int, first: int, after: Place) -> None:
        """`after`: the place of which what we know is the state; `NOWHERE`: of none."""
        self.worker, self.worker_id, self.token = worker, worker_id, token
        self.number = first  # of the next batch
        self._first, self._after = first, after
        self._head_due = True
        self._said: deque[KvBatch | Copying] = deque()
        self._size_bytes = 0

    @property
    def has_copy(self) -> bool:
        """One is on its way."""
        return any(type(one) is Copying for one in self._said)

    @property
    def ready(self) -> bool:
        """Whether there is something to be said now."""
        if self._head_due:
            return True
        first = self._said[0] if self._said else None
        return first is not None and not (type(first) is Copying and first.pieces is None)

    @property
    def copies_next(self) -> bool:
        """What comes next is a piece of a copy."""
        return not self._head_due and bool(self._said) and type(self._said[0]) is Copying

    def tell_head(self) -> None:
        """Somebody may not know where we are."""
        self._head_due = True

    def jump(self) -> None:
        """What is known changed in a way that only a copy tells."""
        self.number += 1
        self._head_due = True

    def drop(self) -> None:
        """What waits is not said any more."""
        self._said.clear()
        self._size_bytes = 0
        self._head_due = True

    def batch(self, seq: int, digest: int, payload: bytes) -> bool:
        """The next batch, applied by us in order; False: it must be told by a copy."""
        pieces = pieces_of(payload)
        if len(pieces) > MAX_BATCH_PIECES or self._size_bytes + len(payload) > _QUEUED_BYTES:
            self.drop()
            return False
        number, self.number = self.number, self.number + 1
        for at, body in enumerate(pieces):
            place = self.worker, self.token, number
            self._said.append(KvBatch(*place, seq, digest, at, len(pieces), body))
        self._size_bytes += len(payload)
        return True

    def begin_copy(self, stream: CopiedStream) -> Copying:
        """After all that waits comes a copy; it has its bytes later (`fill`)."""
        copying = Copying(self.number, stream)
        self._said.append(copying)
        return copying

    def fill(self, copying: Copying, blocks: bytes) -> bool:
        """The bytes of its blocks (`FrozenBlocks.dump`); False: these are too many."""
        stream, bodies = copying.stream, pieces_of(blocks)
        if len(bodies) > MAX_COPY_PIECES:
            if copying in self._said:
                self._said.remove(copying)
            return False
        place = self.worker, self.token, copying.number
        how = stream.next_seq, max(stream.live_seq, -1), stream.digest
        flags = stream.exact, stream.turned_over
        copying.pieces = deque(
            KvCopy(*place, *how, *flags, at, len(bodies), body) for at, body in enumerate(bodies)
        )
        return True

    def next(self) -> KvSaid:
        """What comes next; `ready` says whether there is any."""
        if self._head_due:
            self._head_due = False
            return self._head()
        first = self._said[0]
        if type(first) is Copying:
            assert first.pieces
            piece = first.pieces.popleft()
            if not first.pieces:
                self._said.popleft()
            return piece
        assert type(first) is KvBatch
        self._said.popleft()
        self._size_bytes -= len(first.body)
        return first

    def _head(self) -> KvHead:
        """Where we are once all that waits is said; who heard it before that, asks in vain."""
        waiting = next((one.number for one in self._said), self.number)
        return KvHead(self.worker, self.token, waiting, self._first, *self._after)


Dump = Callable[[FrozenBlocks, Callable[[bytes], None]], None]  # calls back with the bytes


@dataclass(slots=True)
class KvVoiceCounters:
    """Counts only ever grow. Lifetime: process."""

    batches: int = 0  # told
    copies: int = 0  # begun
    jumps: int = 0  # changes that only a copy tells


class KvVoice:
    """Lifetime: process. `dump` makes bytes of blocks: at once, or in a thread."""

    def __init__(
        self, workers: WorkerTable, on_news: Callable[[], None], dump: Dump, credit: CopyCredit
    ) -> None:
        self.counters = KvVoiceCounters()
        self._workers, self._on_news = workers, on_news
        self._dump, self._credit = dump, credit
        self._outlets: dict[str, Outlet] = {}
        self._ready: dict[str, None] = {}  # those that may have something to say, in turn
        self._asked: dict[str, None] = {}  # those of which a copy is wanted, in turn
        self._copying: Outlet | None = None  # one at a time
        self._connected = False
        self._latest = 0  # number of any outlet, so that none begins with one that was told

    def __len__(self) -> int:
        return len(self._outlets)

    def outlet(self, worker: str) -> Outlet | None:
        """Of a worker that we read."""
        return self._outlets.get(worker)

    def open(self, worker: str, worker_id: int, token: int, after: Place = NOWHERE) -> None:
        """We read this worker from now on; what we know is the state of `after`."""
        first = self._latest = max(self._latest, after[1]) + 1
        self._outlets[worker] = Outlet(worker, worker_id, token, first, after)
        self._news(worker)

    def close(self, worker: str) -> Place:
        """We read it no more; where we got to."""
        outlet = self._outlets.pop(worker)
        self._latest = max(self._latest, outlet.number)
        self._ready.pop(worker, None)
        self._asked.pop(worker, None)
        if self._copying is outlet:
            self._copying = None
        return outlet.token, outlet.number

    def applied(self, worker: str, seq: int, digest: int, payload: bytes) -> None:
        """A batch was applied in order."""
        outlet = self._outlets[worker]
        if not self._connected:
            outlet.number += 1
        elif outlet.batch(seq, digest, payload):
            self._news(worker)
        else:
            self._copying = None if self._copying is outlet else self._copying
            self.jumped(worker)

    def jumped(self, worker: str) -> None:
        """What is known of it changed in another way."""
        self.counters.jumps += 1
        self._outlets[worker].jump()
        self._news(worker)

    def connect(self) -> None:
        """Messages get out again: say where we are."""
        self._connected = True
        self._drop()

    def disconnect(self) -> None:
        """They get out no more."""
        self._connected = False
        self._drop()

    def wanted(self, wanted: KvWanted) -> None:
        """A peer knows of a worker's events only those before some batch."""
        outlet = self._outlets.get(wanted.worker)
        if outlet is None or not self._connected or outlet.has_copy:
            return
        if (wanted.token, wanted.number) == (outlet.token, outlet.number):
            outlet.tell_head()
        else:
            self._asked[wanted.worker] = None
        self._news(wanted.worker)

    def fetch(self, now_s: float, room_bytes: int) -> tuple[KvSaid, ...]:
        """What comes next, of about so many bytes; workers take turns."""
        if not (self._ready or self._asked):
            return ()
        self._begin_copy()
        self._credit.earn(now_s)
        said: list[KvSaid] = []
        waiting: list[str] = []  # for bytes of a copy, or until it may be told
        while self._ready and room_bytes > 0:
            worker = next(iter(self._ready))
            del self._ready[worker]
            outlet = self._outlets[worker]
            if not outlet.ready:
                continue
            if outlet.copies_next and self._credit.is_spent:
                waiting.append(worker)
                continue
            one = outlet.next()
            self._count(one, outlet)
            room_bytes -= size_of(one)
            said.append(one)
            self._ready[worker] = None
        self._ready.update(dict.fromkeys(waiting))
        if self._ready or self._asked:
            self._on_news()
        return tuple(said)

    # --- inside -------------------------------------------------------------------------------

    def _begin_copy(self) -> None:
        """Of the first that is wanted and whose state is settled."""
        if self._copying is not None:
            return
        for name in list(self._asked):
            outlet = self._outlets[name]
            worker = self._workers.get(outlet.worker_id)
            stream = None if worker is None else worker.kv.copied()
            if stream is None:
                continue
            del self._asked[name]
            self._copying = outlet
            self.counters.copies += 1
            filled = partial(self._filled, outlet, outlet.begin_copy(stream))
            self._dump(stream.blocks, filled)
            return

    def _filled(self, outlet: Outlet, copying: Copying, blocks: bytes) -> None:
        if not outlet.fill(copying, blocks) and self._copying is outlet:
            self._copying = None  # nobody takes so much
        if self._outlets.get(outlet.worker) is outlet:
            self._news(outlet.worker)

    def _count(self, one: KvSaid, outlet: Outlet) -> None:
        if type(one) is KvBatch:
            self.counters.batches += one.piece == 0
        elif type(one) is KvCopy:
            self._credit.spend(len(one.body))
            if one.piece == one.pieces - 1 and self._copying is outlet:
                self._copying = None

    def _news(self, worker: str) -> None:
        if self._connected:
            first = not self._ready
            self._ready[worker] = None
            if first:
                self._on_news()

    def _drop(self) -> None:
        self._asked.clear()
        self._copying = None
        self._ready = dict.fromkeys(self._outlets) if self._connected else {}
        for outlet in self._outlets.values():
            outlet.drop()
        if self._ready:
            self._on_news()


_MESSAGE_BYTES = 128 << 10  # of what happened, by a rough count; one alone may have twice as many
_PLAIN_BYTES = 160  # of what happened, but for chains
_GROWTH_TOKENS = 64  # of an answer, that are worth telling
_SILENT_S = 0.5  # without a word: then a message says that nothing was missed
_RETELL_S = 0.2  # at least, between two retellings: each costs what all open requests cost
_QUEUED = 200_000  # told to nobody yet; beyond it all is told anew instead


@dataclass(slots=True)
class _Open:
    """One of our requests at a worker. Lifetime: dispatch."""

    sent: Sent  # without its chains
    begun: bool = False
    told_tokens: int = 0
    output_tokens: int = 0


FetchKv = Callable[[float, int], tuple[KvSaid, ...]]


class Uses(Protocol):
    """What our requests use of keys (`router.keys.quota`)."""

    def changed(self) -> list[Use]:
        """Of keys where that changed since this was asked."""
        ...

    def all(self) -> list[Use]:
        """Of all keys."""
        ...


class Voice:
    """A `Listener` of the core, that keeps what it hears until it is fetched. Lifetime: process."""

    def __init__(self, on_news: Callable[[], None], kv: FetchKv = lambda now_s, room: ()) -> None:
        """`on_news` is told when there is something to fetch again; `kv` gives what is to be said
        of KV events, of so many bytes.
        """
        self._on_news, self._kv = on_news, kv
        self.retellings = 0
        self.told = 0  # things that happened, said so far
        self._open: dict[int, _Open] = {}
        self._queue: deque[Happened] = deque()
        self._parts: deque[tuple[Retelling, tuple[Happened, ...]]] = deque()
        self._connected = False
        self._retell = False
        self._untold = True  # what happened is told by the next retelling, which nothing precedes
        self._number = 0
        self._told_open = 0  # requests, as whoever heard all of it must count them
        self._said_s = self._retold_s = float("-inf")

    # --- what the core tells ----------------------------------------------------------------

    def dispatched(self, pending: Pending, worker: Worker, uncached_tokens: int) -> None:
        """A request was charged to a worker."""
        arrival = pending.arrival
        chains = tuple(
            (size, chain[:MAX_CHAIN_BLOCKS].astype(HASH_TYPE, copy=False).tobytes())
            for size, chain in arrival.chains.items()
        )
        sent = Sent(
            arrival.request_id,
            worker.facts.name,
            arrival.model,
            arrival.prompt_tokens,
            uncached_tokens,
            arrival.stream,
            arrival.approximate,
            pending.standing,
            arrival.session,
            arrival.tenant,
            arrival.weight,
            arrival.longest_prompt_tokens,
        )
        self._open[arrival.request_id] = _Open(sent)
        if self._connected:
            self._say(replace(sent, chains=chains))

    def first_token(self, request_id: int) -> None:
        """Its prefill is over."""
        one = self._open.get(request_id)
        if one is not None and not one.begun:
            one.begun = True
            if self._connected:
                self._say(Begun(request_id))

    def progress(self, request_id: int, output_tokens: int) -> None:
        """Its answer has grown to so many tokens."""
        one = self._open.get(request_id)
        if one is None:
            return
        one.output_tokens = output_tokens
        if output_tokens - one.told_tokens >= _GROWTH_TOKENS:
            one.told_tokens = output_tokens
            if self._connected:
                self._say(Grew(request_id, output_tokens))

    def ended(self, request_id: int, finish: Finish | None) -> None:
        """It is at its worker no more; with a `finish` where it was answered."""
        if self._open.pop(request_id, None) is None or not self._connected:
            return
        if finish is None:
            self._say(Ended(request_id))
            return
        counts = finish.prompt_tokens, finish.cached_tokens, finish.output_tokens
        self._say(Ended(request_id, True, *map(_tokens, counts)))

    # --- what is fetched --------------------------------------------------------------------

    def connect(self) -> None:
        """Messages get out again: peers must be told all anew."""
        self._connected = True
        self._drop_queue()

    def disconnect(self) -> None:
        """Messages get out no more: what happens now is told anew later."""
        self._connected = False
        self._drop_queue()

    def retell(self) -> None:
        """A peer missed something."""
        self._retell = True

    def message(self, now_s: float, wants: tuple[str, ...], uses: Uses) -> bytes | None:
        """The next message; None: there is nothing to say."""
        if not self._connected:
            return None
        if self._untold or (not (self._parts or self._queue) and self._due(now_s)):
            self._untold = self._retell = False
            self._retold_s = now_s
            self._parts.extend(_parts(self._all_open()))
            self._told_open = len(self._open)
            self.retellings += 1
        retelling: Retelling = ""
        happened: tuple[Happened, ...] = ()
        size_bytes = 0
        if self._parts:  # what happened since comes after it
            retelling, happened = self._parts.popleft()
            size_bytes = len(happened) * _PLAIN_BYTES
        elif self._queue:
            happened, size_bytes = self._oldest()
        kv = self._kv(now_s, _MESSAGE_BYTES - size_bytes)
        used = uses.all() if retelling in ("first", "only") else uses.changed()
        has_news = happened or retelling or wants or used or kv
        if not has_news and now_s - self._said_s < _SILENT_S:
            return None
        self._said_s = now_s
        self.told += len(happened)
        number, self._number = self._number, self._number + 1
        told_use = tuple(Used(*use) for use in used)
        return encoded(
            Message(VERSION, number, self._told_open, retelling, wants, happened, told_use, kv)
        )

    # --- inside -----------------------------------------------------------------------------

    def _due(self, now_s: float) -> bool:
        return self._retell and now_s - self._retold_s >= _RETELL_S

    def _say(self, one: Happened) -> None:
        if len(self._queue) >= _QUEUED:
            self._drop_queue()
        elif not self._untold:
            self._queue.append(one)
            if len(self._queue) == 1:
                self._on_news()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._parts.clear()
        self._untold = True

    def _oldest(self) -> tuple[tuple[Happened, ...], int]:
        """As many of the queue as a message holds, at least one; and their bytes."""
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

    def _all_open(self) -> Iterator[Happened]:
        for request_id, one in self._open.items():
            yield one.sent
            if one.begun:
                yield Begun(request_id)
            if one.output_tokens:
                one.told_tokens = one.output_tokens
                yield Grew(request_id, one.output_tokens)


def _parts(happened: Iterator[Happened]) -> list[tuple[Retelling, tuple[Happened, ...]]]:
    """Cut into messages; there is one also where nothing is open."""
    cuts: list[tuple[Happened, ...]] = []
    while cut := tuple(islice(happened, _MESSAGE_BYTES // _PLAIN_BYTES)):
        cuts.append(cut)
    if len(cuts) < 2:
        return [("only", cuts[0] if cuts else ())]
    between: list[tuple[Retelling, tuple[Happened, ...]]] = [("more", cut) for cut in cuts[1:-1]]
    return [("first", cuts[0]), *between, ("last", cuts[-1])]


def _size_bytes(one: Happened) -> int:
    chains = one.chains if type(one) is Sent else ()
    return _PLAIN_BYTES + sum(len(chain) for _, chain in chains)


def _tokens(count: int | None) -> int | None:
    """As it may be told: a worker may have counted anything."""
    return None if count is None else min(max(count, 0), MAX_TOKENS)

"""What this replica tells its peers of the KV events that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvkernels import FrozenBlocks
from router.core.workers import WorkerTable
from router.replicas.kv_credit import CopyCredit
from router.replicas.kv_messages import KvBatch, KvCopy, KvSaid, KvWanted, size_of
from router.replicas.kv_outlet import NOWHERE, Copying, Outlet, Place

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

"""The table of workers: identity, slot, state, and setting aside those that keep failing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.facts import WorkerFacts
from router.core.kv_state import KvState
from router.core.settings import CoreSettings

_BACKOFF_MAX = 16.0  # the time aside grows to at most this many times `recover_s`


@dataclass(slots=True)
class Worker:
    """Lifetime: worker. `state` is what the shell said last; `aside_until_s` is our own view."""

    worker_id: int
    slot: int
    facts: WorkerFacts
    kv: KvState
    state: str = "ready"
    failures: int = 0  # in a row
    ejections: int = 0  # since its last success
    aside_until_s: float = field(default=float("-inf"))

    def takes_requests(self, now_s: float) -> bool:
        """Whether it may be given new requests now."""
        return self.state == "ready" and now_s >= self.aside_until_s

    def shown_state(self, now_s: float) -> str:
        """The state as people see it."""
        if self.state == "ready" and now_s < self.aside_until_s:
            return "ejected"
        return self.state

    def succeeded(self) -> None:
        """It answered: all is forgiven."""
        self.failures = 0
        self.ejections = 0

    def failed(self, now_s: float, settings: CoreSettings) -> bool:
        """It failed a request; True when that puts it aside.

        After its time aside it is tried again with real requests: one failure more puts it
        aside for twice as long, one success brings it back for good. Failures while it is aside
        are those of requests it had before, and say nothing new.
        """
        self.failures += 1
        if self.failures < settings.ejection_failures or now_s < self.aside_until_s:
            return False
        factor = min(2.0**self.ejections, _BACKOFF_MAX)
        self.aside_until_s = now_s + settings.recover_s * factor
        self.ejections += 1
        return True


@dataclass(frozen=True, slots=True)
class _Pool:
    """What is the same for all requests to one model. Lifetime: until a worker changes."""

    identity: tuple[str, str | None]
    block_sizes: frozenset[int]


class WorkerTable:
    """All workers, by id; slots are reused, ids never. Lifetime: process."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._workers: dict[int, Worker] = {}
        self.version = 0  # of what is said of the workers: what was made of it before is stale
        self._pools: dict[str, _Pool] = {}  # of models that are served; as old as `version`

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: int) -> Worker | None:
        """The worker, or None when it is gone."""
        return self._workers.get(worker_id)

    def changed(self) -> None:
        """Say that a worker came, left, or is not what it was (state, facts, time aside)."""
        self.version += 1
        self._pools.clear()

    def failed(self, worker: Worker, now_s: float, settings: CoreSettings) -> bool:
        """A worker failed a request; True when that puts it aside (`Worker.failed`)."""
        aside = worker.failed(now_s, settings)
        if aside:
            self.changed()
        return aside

    def take_slot(self) -> int | None:
        """A free slot, or None when the table is full."""
        return self._free.pop() if self._free else None

    def add(self, worker: Worker) -> None:
        """Enter a worker that was given a slot."""
        self._workers[worker.worker_id] = worker
        self.changed()

    def remove(self, worker_id: int) -> None:
        """Forget a worker; its slot may be given to the next one."""
        worker = self._workers.pop(worker_id)
        self.changed()
        self._free.append(worker.slot)

    def models(self) -> list[str]:
        """Names of all models served, sorted."""
        return sorted({model for worker in self for model in worker.facts.models})

    def identity(self, model: str) -> tuple[str, str | None]:
        """(base model, LoRA adapter or None) behind a model's name; its own where unknown.

        A worker's first model is its base; further names are aliases of it or its adapters.
        """
        pool = self._pool(model)
        return (model, None) if pool is None else pool.identity

    def block_sizes(self, model: str) -> frozenset[int]:
        """Block sizes of a model's pool; none where it is not served."""
        pool = self._pool(model)
        return frozenset() if pool is None else pool.block_sizes

    def _pool(self, model: str) -> _Pool | None:
        """What every request to `model` asks, without a look at each worker; None: not served."""
        pool = self._pools.get(model)
        if pool is None and (serving := self.serving(model)):
            first = serving[0].facts
            adapter = model if model in first.adapters else None
            sizes = frozenset(w.facts.block_size for w in serving)
            pool = self._pools[model] = _Pool((first.models[0], adapter), sizes)
        return pool

    def serving(self, model: str) -> list[Worker]:
        """Workers of a model's pool, whatever their state, in the order of their ids."""
        return [w for w in self if model in w.facts.models]

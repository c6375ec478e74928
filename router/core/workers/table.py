"""The table of workers, with each worker's id, slot, state and health."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from policies.facts import Role, WorkerFacts
from router.core.contract.counters import Window
from router.core.workers.kv_state import KvState
from router.core.workers.served_models import ServedModels
from router.core.workers.states import HEALTH_STATES, WORKER_STATES, HealthState, WorkerState

# Most causes counted separately; there are a dozen, but a recording may contain anything.
_CAUSES = 32


@dataclass(slots=True)
class WorkerHealth:
    """A worker's health, derived from its answers and failures.

    Only `health.OutlierDetection` changes it.
    Lifetime: worker.
    """

    recent: Window  # (answers, failures); an answer counts when it begins
    state: HealthState = "healthy"
    failed: int = 0  # all failures
    well_at: int = 0  # the value of `failed` at the latest answer that succeeded
    # Begun answers, oldest first, with the value of `failed` at their start.
    running: dict[int, int] = field(default_factory=dict)
    broken: float = 0.0  # broken answers, less those that complete answers offset
    ejections: int = 0  # in a row, each longer than the one before
    since_s: float = field(default=float("-inf"))  # when it was ejected
    until_s: float = field(
        default=float("-inf")
    )  # until it is probed (again), or is tried no longer; healthy: until ejections are forgotten
    trial: int | None = None  # the one request it has on trial
    stalled: bool = False  # it was ejected for standing still
    causes: Counter[str] = field(default_factory=Counter)  # all failures ever, by cause

    @property
    def takes_requests(self) -> bool:
        """Return True if the worker is healthy enough for another request now.

        A worker on trial takes one request at a time.
        """
        return self.state == "healthy" or (self.state == "trial" and self.trial is None)

    @property
    def failures(self) -> int:
        """The number of consecutive failures since the latest good answer.

        An answer that has begun and still runs counts as good.
        """
        well_at = self.well_at
        if self.running:
            well_at = max(well_at, next(reversed(self.running.values())))
        return self.failed - well_at

    def end_row(self) -> None:
        """Set the count of consecutive failures to 0."""
        self.well_at = self.failed

    def count_failure(self, cause: str) -> None:
        """Count a failure of the worker by its cause."""
        known = cause in self.causes or len(self.causes) < _CAUSES
        self.causes[cause if known else "other"] += 1

    def move(self, event: str) -> None:
        """Change to the health state that follows from the present one after `event`.

        Raises KeyError if `event` cannot happen in the present state.
        """
        self.state = HEALTH_STATES[self.state, event]

    def clear_failures(self) -> None:
        """Make a worker that came back healthy again, and forget its ejections and recent failures.

        The total counts of failures for metrics stay.
        """
        self.move("it comes back from being down")
        self.ejections = 0
        self.broken = 0.0
        self.stalled = False
        self.trial = None
        self.recent.clear()
        self.end_row()


@dataclass(slots=True)
class BusySpell:
    """A period in which a busy worker gets fewer new requests, because the worker asked for this.
    Only `busy.BusyWorkers` changes it. Lifetime: worker.
    """

    on: bool = False
    times: int = 0  # spells one after the other, without an answer between
    until_s: float = -inf  # of this one, or the latest
    retry_s: float = -inf  # end of the one before: since then it was asked again


@dataclass(slots=True)
class Silent:
    """Records since when a worker has left probes unanswered, and how many in a row.

    Lifetime: until the worker answers or counts as down.
    """

    since_s: float
    probes: int  # in a row
    excused: int = 0  # unanswered probes up to when most of its model's workers were last silent
    moved: bool = False  # requests without a first byte were told to go elsewhere


@dataclass(slots=True)
class Worker:
    """A worker as the core knows it: its description, state, health and cache.

    `state` is the last state that the fleet reported. `health` is what the core itself observed.
    Lifetime: worker.
    """

    worker_id: int
    slot: int
    facts: WorkerFacts
    kv: KvState
    health: WorkerHealth
    state: WorkerState = "new"
    joined_s: float = -inf
    spell: BusySpell = field(default_factory=BusySpell)
    silent: Silent | None = None
    reported_facts: WorkerFacts | None = (
        None  # its own report, if its events show another block size
    )

    def move(self, event: str) -> None:
        """Change `state` to the state that the fleet reports in `event`.

        Raises KeyError if the reported state cannot follow the present one.
        """
        self.state = WORKER_STATES[self.state, event]

    @property
    def has_usable_events(self) -> bool:
        """True if the worker's KV events show its cache. False means that the worker has no usable
        events, so its cache is estimated.
        """
        return self.facts.has_events and self.kv.guessed is None

    @property
    def told_block_size(self) -> int:
        """The block size in tokens that the worker reports. The worker's KV events may show another
        size.
        """
        return (self.reported_facts or self.facts).block_size

    @property
    def busy(self) -> bool:
        """True while other workers are preferred, because this worker reported that it is busy."""
        return self.spell.on

    @property
    def is_in(self) -> bool:
        """True if the worker is ready and healthy, and answers probes."""
        return self.state == "ready" and self.health.state == "healthy" and self.silent is None

    @property
    def takes_requests(self) -> bool:
        """True if the worker may get new requests now. A worker on trial takes one request at a
        time.
        """
        return self.state == "ready" and self.health.takes_requests and self.silent is None

    @property
    def shown_state(self) -> str:
        """The worker's state in one word, as operators see it."""
        if self.state == "ready" and self.silent is not None:
            return "down" if self.silent.moved else "silent"
        if self.state == "ready" and self.health.state != "healthy":
            return "trial" if self.health.state == "trial" else "ejected"
        return "busy" if self.state == "ready" and self.spell.on else self.state


@dataclass(frozen=True, slots=True)
class HalfMissing:
    """Says that a group has only prefill workers or only decode workers, so that no pair exists.

    Lifetime: until the group changes.
    """

    group: str | None  # None: these workers have none, and no worker can take KV from them
    role: Role  # the role that they have
    workers: int

    @property
    def missing(self) -> str:
        """The kind of work that no worker of the group does: "prefills" or "decodes"."""
        return "decodes" if self.role == "prefill" else "prefills"

    def __str__(self) -> str:
        """Return the problem as a sentence for the operator."""
        group = "without a group" if self.group is None else f"of the group {self.group!r}"
        return f"nobody {group} {self.missing}: {self.workers} have the role {self.role}"


def halves_missing(facts: Iterable[WorkerFacts]) -> list[HalfMissing]:
    """Return the groups that have prefill workers but no decode workers, or the reverse. A worker
    that can both prefill and decode fills the gap. Prefill and decode workers without a group are
    always returned, because they cannot form pairs.
    """
    roles: dict[str | None, Counter[Role]] = {}
    for one in facts:
        roles.setdefault(one.group, Counter())[one.role] += 1
    found = []
    for group, counts in roles.items():
        for role, other in _OTHER.items():
            if counts[role] and (group is None or not (counts[other] or counts["both"])):
                found.append(HalfMissing(group, role, counts[role]))
    return found


_OTHER: Mapping[Role, Role] = MappingProxyType({"prefill": "decode", "decode": "prefill"})


def serves(facts: Sequence[WorkerFacts]) -> bool:
    """Return True if these workers of a model can serve a request. To serve a request takes one
    worker that serves whole requests, or a prefill and a decode worker of one group.
    """
    if any(one.role == "both" or one.serves_alone for one in facts):
        return True
    groups = {one.group for one in facts if one.role == "prefill"} - {None}
    return any(one.role == "decode" and one.group in groups for one in facts)


@dataclass(frozen=True, slots=True)
class _ModelPool:
    """Facts about a model's workers that do not depend on the request, remembered for speed.

    Lifetime: until a worker changes.
    """

    identity: tuple[str, str | None]
    block_sizes: frozenset[int]
    splits: bool  # some of its workers prefill for others


class WorkerTable:
    """Holds all workers by their ids, and the free slots. A slot is the row of a worker in the
    worker columns. After a worker has left, another worker may get its slot, but never its id.
    Lifetime: process.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._workers: dict[int, Worker] = {}
        # Changes with the workers' facts; data derived from an older version are stale.
        self.version = 0
        self._pools: dict[str, _ModelPool] = {}  # of models that are served; as old as `version`
        self._served = ServedModels()
        self._served_version = -1  # the version of the workers that `_served` counts

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: int) -> Worker | None:
        """Return the worker with this id, or None if it has left or never existed."""
        return self._workers.get(worker_id)

    def label(self, worker_id: int) -> str:
        """Return a worker's name for logs: its id, and its URL while the worker is in the table."""
        worker = self._workers.get(worker_id)
        return f"worker {worker_id}" + (f" ({worker.facts.name})" if worker else "")

    def changed(self) -> None:
        """Drop remembered results about workers, because a worker joined, left or changed."""
        self.version += 1
        self._pools.clear()

    def take_slot(self) -> int | None:
        """Take a free slot for a new worker, and return it. Return None if no slot is free."""
        return self._free.pop() if self._free else None

    def add(self, worker: Worker) -> None:
        """Add a worker, for which `take_slot` has returned a slot."""
        self._workers[worker.worker_id] = worker
        self.changed()

    def remove(self, worker_id: int) -> None:
        """Remove a worker, and free its slot for another worker."""
        worker = self._workers.pop(worker_id)
        self.changed()
        self._free.append(worker.slot)

    def models(self) -> list[str]:
        """Return the names of all models that workers serve, sorted."""
        return sorted({model for worker in self for model in worker.facts.models})

    def serves(self, model: str) -> bool:
        """Return True if a worker serves a model, whatever the worker's state."""
        if self._served_version != self.version:
            self._served_version = self.version
            self._served.look((w.worker_id, w.facts.models) for w in self)
        return model in self._served

    def identity(self, model: str) -> tuple[str, str | None]:
        """Return the base model that a model name means, and its LoRA adapter or None.

        The first model of a worker is its base model. Its other names are aliases or adapters. A
        name that no worker serves is returned as a base model.
        """
        pool = self._pool(model)
        return (model, None) if pool is None else pool.identity

    def block_sizes(self, model: str) -> frozenset[int]:
        """Return the different block sizes, in tokens, of the workers that serve a model."""
        pool = self._pool(model)
        return frozenset() if pool is None else pool.block_sizes

    def splits(self, model: str) -> bool:
        """Return True if some workers of the model only prefill or only decode.

        Then a request may go to a prefill worker and a decode worker.
        """
        pool = self._pool(model)
        return pool is not None and pool.splits

    def _pool(self, model: str) -> _ModelPool | None:
        """Return remembered facts about the workers that serve a model, or None if no worker serves
        it.
        """
        pool = self._pools.get(model)
        if pool is None and self.serves(model) and (serving := self.serving(model)):
            first = serving[0].facts
            adapter = model if model in first.adapters else None
            sizes = frozenset(w.facts.block_size for w in serving)
            splits = any(w.facts.role != "both" for w in serving)
            pool = self._pools[model] = _ModelPool((first.models[0], adapter), sizes, splits)
        return pool

    def halves_missing(self, model: str) -> list[HalfMissing]:
        """Return the groups of a model's ready workers that lack prefill or decode workers.

        See the function `halves_missing`.
        """
        return halves_missing(w.facts for w in self.serving(model) if w.state == "ready")

    def serving(self, model: str) -> list[Worker]:
        """Return all workers that serve a model, whatever their state, ordered by id."""
        return [w for w in self if model in w.facts.models]

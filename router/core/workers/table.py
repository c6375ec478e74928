"""The table of workers, with the id, slot, state and health of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from policies.facts import Role, WorkerFacts
from router.core.contract.counters import Window
from router.core.workers.kv_state import KvState
from router.core.workers.states import HEALTH_STATES, WORKER_STATES, HealthState, WorkerState

_CAUSES = 32  # told apart; there are a dozen, but a recording may hold anything


@dataclass(slots=True)
class WorkerHealth:
    """The health of a worker, as its answers and failures show it.

    Only `health.OutlierDetection` changes it. Lifetime: worker.
    """

    recent: Window  # (answers, failures); an answer counts when it begins
    state: HealthState = "healthy"
    failed: int = 0  # all failures
    well_at: int = 0  # so many of these came before the latest answer that went well
    running: dict[int, int] = field(default_factory=dict)  # begun answers, oldest first: the same
    broken: float = 0.0  # answers that broke off, less what those that did not make good
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
        """Return True if the worker's health allows another request now."""
        return self.state == "healthy" or (self.state == "trial" and self.trial is None)

    @property
    def failures(self) -> int:
        """Number of failures in a row, since the latest answer that ended well or still runs."""
        well_at = self.well_at
        if self.running:
            well_at = max(well_at, next(reversed(self.running.values())))
        return self.failed - well_at

    def end_row(self) -> None:
        """End the row of failures, so that the next failure is the first."""
        self.well_at = self.failed

    def count_failure(self, cause: str) -> None:
        """Count a failure by its cause."""
        known = cause in self.causes or len(self.causes) < _CAUSES
        self.causes[cause if known else "other"] += 1

    def move(self, event: str) -> None:
        """Change the health state by an event.

        Raises KeyError if the present state does not have this event.
        """
        self.state = HEALTH_STATES[self.state, event]

    def forgive(self) -> None:
        """Treat the worker as a new one; its counts of failures stay."""
        self.move("it comes back from being down")
        self.ejections = 0
        self.broken = 0.0
        self.stalled = False
        self.trial = None
        self.recent.clear()
        self.end_row()


@dataclass(slots=True)
class BusySpell:
    """A time for which a worker asked to be spared new requests.

    Only `busy.BusyWorkers` changes it. Lifetime: worker.
    """

    on: bool = False
    times: int = 0  # spells one after the other, without an answer between
    until_s: float = -inf  # of this one, or the latest
    asked_s: float = -inf  # end of the one before: since then it was asked again


@dataclass(slots=True)
class Silent:
    """The state of a worker that leaves probes unanswered.

    Lifetime: until the worker answers, or is down.
    """

    since_s: float
    probes: int  # in a row
    excused: int = 0  # of these, those up to when most of its model's workers were silent last
    moved: bool = False  # what waits there for a first byte was told to go elsewhere


@dataclass(slots=True)
class Worker:
    """A worker that the core knows, with its state, its health and its cache.

    `state` is what the program around the core reported last. `health` is what the core observed.
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
    told: WorkerFacts | None = None  # what it says itself, where its events say another block size

    def move(self, event: str) -> None:
        """Change the state as the program around the core reports.

        Raises KeyError if the present state does not allow the reported state.
        """
        self.state = WORKER_STATES[self.state, event]

    @property
    def tells(self) -> bool:
        """True if the worker's KV events report its cache; otherwise the cache is estimated."""
        return self.facts.has_events and self.kv.guessed is None

    @property
    def told_block_size(self) -> int:
        """Tokens per block, as the worker itself reports."""
        return (self.told or self.facts).block_size

    @property
    def busy(self) -> bool:
        """True if the worker asked to be spared, so that other workers are preferred."""
        return self.spell.on

    @property
    def is_in(self) -> bool:
        """True if the worker is ready, healthy, and answers probes."""
        return self.state == "ready" and self.health.state == "healthy" and self.silent is None

    @property
    def takes_requests(self) -> bool:
        """True if the worker may get new requests now."""
        return self.state == "ready" and self.health.takes_requests and self.silent is None

    @property
    def shown_state(self) -> str:
        """The worker's state as shown to people."""
        if self.state == "ready" and self.silent is not None:
            return "down" if self.silent.moved else "silent"
        if self.state == "ready" and self.health.state != "healthy":
            return "trial" if self.health.state == "trial" else "ejected"
        return "busy" if self.state == "ready" and self.spell.on else self.state


@dataclass(frozen=True, slots=True)
class HalfMissing:
    """Workers of one role (prefill or decode) whose group has no worker of the other role.

    Lifetime: as long as this is so.
    """

    group: str | None  # None: these have none, and nobody can take KV from them
    role: Role  # that they have
    workers: int

    @property
    def missing(self) -> str:
        """The work that no worker of the group does: "prefills" or "decodes"."""
        return "decodes" if self.role == "prefill" else "prefills"

    def __str__(self) -> str:
        """Return a sentence for people."""
        group = "without a group" if self.group is None else f"of the group {self.group!r}"
        return f"nobody {group} {self.missing}: {self.workers} have the role {self.role}"


def halves_missing(facts: Iterable[WorkerFacts]) -> list[HalfMissing]:
    """Return the groups of a model's workers that have only one role, prefill or decode.

    A worker that can do all of a request counts as the other role.
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
    """Return True if a model's workers can serve a request, by one worker or by a pair."""
    if any(one.role == "both" or one.serves_alone for one in facts):
        return True
    groups = {one.group for one in facts if one.role == "prefill"} - {None}
    return any(one.role == "decode" and one.group in groups for one in facts)


@dataclass(frozen=True, slots=True)
class _ModelPool:
    """Facts about the workers of one model that are the same for all requests.

    Lifetime: until a worker changes.
    """

    identity: tuple[str, str | None]
    block_sizes: frozenset[int]
    splits: bool  # some of its workers prefill for others of it


class WorkerTable:
    """All workers by id; slots are reused, ids never are.

    Lifetime: process.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._workers: dict[int, Worker] = {}
        self.version = 0  # of what is said of the workers: what was made of it before is stale
        self._pools: dict[str, _ModelPool] = {}  # of models that are served; as old as `version`

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: int) -> Worker | None:
        """Return the worker, or None if it is gone."""
        return self._workers.get(worker_id)

    def changed(self) -> None:
        """Record that a worker came, left or changed, so that remembered results are dropped."""
        self.version += 1
        self._pools.clear()

    def take_slot(self) -> int | None:
        """Return a free slot, or None if the table is full."""
        return self._free.pop() if self._free else None

    def add(self, worker: Worker) -> None:
        """Add a worker that was given a slot."""
        self._workers[worker.worker_id] = worker
        self.changed()

    def remove(self, worker_id: int) -> None:
        """Remove a worker, whose slot may be given to another one."""
        worker = self._workers.pop(worker_id)
        self.changed()
        self._free.append(worker.slot)

    def models(self) -> list[str]:
        """Return the names of all models served, sorted."""
        return sorted({model for worker in self for model in worker.facts.models})

    def identity(self, model: str) -> tuple[str, str | None]:
        """Return the base model behind a model's name, and its LoRA adapter or None.

        A worker's first model is its base model; further names are aliases or adapters. An unknown
        name is returned as its own base.
        """
        pool = self._pool(model)
        return (model, None) if pool is None else pool.identity

    def block_sizes(self, model: str) -> frozenset[int]:
        """Return the block sizes of a model's workers, or an empty set if there are none."""
        pool = self._pool(model)
        return frozenset() if pool is None else pool.block_sizes

    def splits(self, model: str) -> bool:
        """Return True if separate workers may prefill and decode a request to the model."""
        pool = self._pool(model)
        return pool is not None and pool.splits

    def _pool(self, model: str) -> _ModelPool | None:
        """Return the remembered facts about a model's workers, or None if there are none."""
        pool = self._pools.get(model)
        if pool is None and (serving := self.serving(model)):
            first = serving[0].facts
            adapter = model if model in first.adapters else None
            sizes = frozenset(w.facts.block_size for w in serving)
            splits = any(w.facts.role != "both" for w in serving)
            pool = self._pools[model] = _ModelPool((first.models[0], adapter), sizes, splits)
        return pool

    def halves_missing(self, model: str) -> list[HalfMissing]:
        """Return the groups of a model's ready workers that lack prefill or decode workers."""
        return halves_missing(w.facts for w in self.serving(model) if w.state == "ready")

    def serving(self, model: str) -> list[Worker]:
        """Return all workers of a model in any state, in the order of their ids."""
        return [w for w in self if model in w.facts.models]

"""Which workers shall be in the fleet, and what it means that one is on its way out of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policies.facts import Role
from router.engines.spec import WorkerSpec, of_rank

Key = tuple[str, int | None]  # a worker's URL and rank: which one it is, whoever names it
CONFIGURATION = "configuration"


@dataclass(frozen=True, slots=True)
class WantedWorker:
    """A worker that somebody names: `by` says who, to people."""

    spec: WorkerSpec
    by: str = CONFIGURATION

    @property
    def key(self) -> Key:
        """Which worker it is."""
        return key_of(self.spec)


@dataclass(slots=True)
class NamedWorker:
    """A worker as somebody named it: one member, or one for each rank of its engine."""

    spec: WorkerSpec
    by: str = CONFIGURATION  # who names it
    by_hand: bool = False  # it stays until it is removed by hand, whoever else names it
    without: set[int] = field(default_factory=set)  # ranks that the operator took out again
    trouble: str = ""  # why ranks are missing, as last logged
    refused_ranks: int = 0  # how many are


@dataclass(frozen=True, slots=True)
class Leaving:
    """A worker is on its way out. Lifetime: until it is gone, or is named again."""

    since_s: float
    may_return: bool  # whoever named it can name it again
    drained: bool  # it was draining before


@dataclass(slots=True)
class Turning:
    """A worker drains, to take another role then. Lifetime: until it has it, or keeps its own."""

    role: Role
    since_s: float
    drained: bool  # it was draining before
    switching: bool = False  # its engine is being told


def key_of(spec: WorkerSpec) -> Key:
    """Which worker it is."""
    return spec.url, spec.rank


def spec_of(named: NamedWorker, rank: int | None) -> WorkerSpec:
    """The options of one member of `named`. Raises WorkerSpecError."""
    if rank is None or named.spec.rank is not None:
        return named.spec
    return of_rank(named.spec, rank)


def same_but_thresholds(one: WorkerSpec, other: WorkerSpec) -> bool:
    """Whether they differ at most in what can change while the worker serves."""
    return other == replace(
        one,
        max_requests=other.max_requests,
        max_queued_tokens=other.max_queued_tokens,
        max_kv_fraction=other.max_kv_fraction,
        weight=other.weight,
        revision=other.revision,
    )

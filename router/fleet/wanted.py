"""Defines the workers that the fleet should have, and the states of a worker that leaves or changes
its role.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policies.facts import Role
from router.engines.spec import WorkerSpec, of_rank

Key = tuple[str, int | None]  # a worker's URL and rank, which identify it whichever source lists it
CONFIGURATION = "configuration"


@dataclass(frozen=True, slots=True)
class WantedWorker:
    """A worker that the configuration, a source or an operator lists; `by` names which of them, for
    people.
    """

    spec: WorkerSpec
    by: str = CONFIGURATION

    @property
    def key(self) -> Key:
        """The URL and the rank that identify the worker."""
        return key_of(self.spec)


@dataclass(slots=True)
class NamedWorker:
    """A listed worker, which has one member of the fleet, or one for each rank of its engine."""

    spec: WorkerSpec
    by: str = CONFIGURATION  # the source that lists it
    by_hand: bool = False  # it stays until it is removed by hand, even if a source lists it, too
    without: set[int] = field(default_factory=set)  # ranks that the operator took out again
    trouble: str = ""  # why ranks are missing, as last logged
    refused_ranks: int = 0  # how many are


@dataclass(frozen=True, slots=True)
class Leaving:
    """The state of a worker that is leaving. Lifetime: until it is gone, or is listed again."""

    since_s: float
    may_return: bool  # the source that listed it can list it again
    drained: bool  # it was draining before


@dataclass(slots=True)
class Turning:
    """The state of a worker that drains in order to take another role. Lifetime: until it has the
    role, or keeps its own.
    """

    role: Role
    since_s: float
    drained: bool  # it was draining before
    switching: bool = False  # its engine is being told the new role


def key_of(spec: WorkerSpec) -> Key:
    """Return the URL and the rank that identify a worker."""
    return spec.url, spec.rank


def spec_of(named: NamedWorker, rank: int | None) -> WorkerSpec:
    """Return the options of the member for `rank` of a listed worker. Raises WorkerSpecError if the
    rank does not fit them.
    """
    if rank is None or named.spec.rank is not None:
        return named.spec
    return of_rank(named.spec, rank)


def same_but_thresholds(one: WorkerSpec, other: WorkerSpec) -> bool:
    """Return whether the two specs differ at most in options that can change while the worker
    serves.
    """
    return other == replace(
        one,
        max_requests=other.max_requests,
        max_queued_tokens=other.max_queued_tokens,
        max_kv_fraction=other.max_kv_fraction,
        weight=other.weight,
        revision=other.revision,
    )

"""What the decision core asks its shell to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.contract import Floats, Ints
from policies.facts import Role
from policies.pick import ranked
from policies.record import record
from router.core.details import Details

_EXPLAINED = 3  # candidates named in a decision


@record
class Stage:
    """One leg of a dispatch. Today there is one, on a worker whose role is "both"."""

    worker_id: int
    role: Role


@record
class Candidate:
    """A worker that was considered: its cost in the policy's own unit, and its expected hit."""

    worker_id: int
    cost: float
    hit_tokens: int


@record
class Ranking:
    """What the best workers of a decision can still be told from. Lifetime: until it is asked."""

    worker_ids: Sequence[int]
    costs: Floats  # its own copy: a policy may use its array again
    hit_tokens: Ints
    chosen: int  # row

    def best(self) -> tuple[Candidate, ...]:
        """At most three: the chosen one first, then by cost."""
        rows = [self.chosen]
        rows += [r for r in ranked(self.costs, _EXPLAINED).tolist() if r != self.chosen]
        return tuple(
            Candidate(self.worker_ids[r], float(self.costs[r]), int(self.hit_tokens[r]))
            for r in rows[:_EXPLAINED]
        )


class Decision:
    """Why a request goes where it goes. Frozen, and equal by value.

    Its candidates are named when somebody reads them: few decisions are ever read. `unit` and
    `details` are about it and no part of it: they are not compared, nor recorded.
    """

    __slots__ = (
        "_candidates", "approximate", "details", "hit_tokens", "policy", "prompt_tokens", "reason",
        "unit",
    )  # fmt: skip

    def __init__(
        self,
        policy: str,
        reason: str,
        hit_tokens: int,
        prompt_tokens: int,
        candidates: tuple[Candidate, ...] | Ranking,
        approximate: bool,
        unit: str | None = None,
    ) -> None:
        self.policy = policy
        self.reason = reason  # "policy", "only_worker", "retry", "migration", "held" or "fallback"
        self.hit_tokens = hit_tokens  # expected on the chosen worker
        self.prompt_tokens = prompt_tokens
        self._candidates = candidates
        self.approximate = approximate  # hits were expected from text, not the engine's tokens
        self.unit = unit  # of the costs, where the policy says
        self.details: Details | None = None  # where somebody asked for them

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best three, the chosen one first."""
        if isinstance(self._candidates, Ranking):
            self._candidates = self._candidates.best()
        return self._candidates

    def trim(self, workers: int) -> None:
        """Name the best three now where more were weighed: that is how many costs may be kept."""
        if isinstance(self._candidates, Ranking) and len(self._candidates.worker_ids) > workers:
            self._candidates = self._candidates.best()

    def _parts(self) -> tuple[object, ...]:
        of_request = (self.policy, self.reason, self.hit_tokens, self.prompt_tokens)
        return (*of_request, self.candidates, self.approximate)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decision) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __repr__(self) -> str:
        return f"Decision{self._parts()!r}"


@record
class Dispatch:
    """Send the request. Its load is already charged."""

    request_id: int
    stages: tuple[Stage, ...]
    decision: Decision
    after_s: float = 0.0  # to wait before, after another worker failed it

    @property
    def worker_id(self) -> int:
        """The worker that answers the client."""
        return self.stages[-1].worker_id


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the request; a later action dispatches or rejects it."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer the client with an error. `retry_after_s` is None where trying again is pointless."""

    request_id: int
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Resync:
    """KV events of a worker were missed: ask for a replay from `from_seq` (0: late joiner)."""

    worker_id: int
    from_seq: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop what the worker does for this request."""

    request_id: int
    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class PutAside:
    """Tell people that a worker failed too often and gets no new requests for a while."""

    worker_id: int
    aside_s: float
    reason: str  # of its last failure


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Tell people that a worker which was put aside has answered and gets requests as before."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a worker whether it is well, at once, and tell the answer as `Probed`."""

    worker_id: int
    within_s: float | None = None  # how long it may take; None: as long as any probe


Action = Dispatch | Hold | Reject | Resync | Cancel | PutAside | TakeBack | Probe

"""What the decision core asks its shell to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.contract import Floats, Ints
from policies.facts import Role
from policies.pick import ranked
from policies.record import record

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


class Ranking:
    """The best workers of one decision, worked out when somebody asks: few decisions are read.

    Keeps every row's cost and hit until then. Lifetime: decision.
    """

    __slots__ = ("_best", "_chosen", "_costs", "_hit_tokens", "_worker_ids")

    def __init__(
        self, worker_ids: Sequence[int], costs: Floats, hit_tokens: Ints, chosen: int
    ) -> None:
        self._worker_ids = worker_ids
        self._costs: Floats | None = costs.copy()  # a policy may use its array again
        self._hit_tokens: Ints | None = hit_tokens
        self._chosen = chosen
        self._best: tuple[Candidate, ...] = ()

    @property
    def best(self) -> tuple[Candidate, ...]:
        """At most three: the chosen one first, then by cost."""
        if self._costs is not None and self._hit_tokens is not None:
            rows = [self._chosen]
            rows += [r for r in ranked(self._costs, _EXPLAINED).tolist() if r != self._chosen]
            self._best = tuple(
                Candidate(self._worker_ids[r], float(self._costs[r]), int(self._hit_tokens[r]))
                for r in rows[:_EXPLAINED]
            )
            self._costs = self._hit_tokens = None
            self._worker_ids = ()
        return self._best

    def __repr__(self) -> str:
        return repr(self.best)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranking) and self.best == other.best

    def __hash__(self) -> int:
        return hash(self.best)


@record
class Decision:
    """Why a request goes where it goes."""

    policy: str
    reason: str  # "policy", "only_worker", "retry" or "held"
    hit_tokens: int  # expected on the chosen worker
    prompt_tokens: int
    ranking: Ranking
    approximate: bool  # hits were expected from text blocks, not from the engine's tokens

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best three, the chosen one first."""
        return self.ranking.best


@record
class Dispatch:
    """Send the request. Its load is already charged."""

    request_id: int
    stages: tuple[Stage, ...]
    decision: Decision

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


Action = Dispatch | Hold | Reject | Resync | Cancel | PutAside

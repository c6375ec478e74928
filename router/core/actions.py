"""What the decision core asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from policies.facts import Role


@dataclass(frozen=True, slots=True)
class Stage:
    """One leg of a dispatch. Today there is one, on a worker whose role is "both"."""

    worker_id: int
    role: Role


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that was considered: its cost in the policy's own unit, and its expected hit."""

    worker_id: int
    cost: float
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a request goes where it goes."""

    policy: str
    reason: str  # "policy", "only_worker", "retry" or "held"
    hit_tokens: int  # expected on the chosen worker
    prompt_tokens: int
    candidates: tuple[Candidate, ...]  # the best three, the chosen one first
    approximate: bool  # hits were expected from text blocks, not from the engine's tokens


@dataclass(frozen=True, slots=True)
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

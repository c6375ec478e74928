"""The actions that the core returns to its caller, and the records of its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from policies.contract import FleetView, Floats, Ints, RequestView, TableFleet
from policies.facts import Role
from policies.pick import ranked
from policies.record import record

SHOWN_WORKERS = 8  # of a thousand
MAX_TERMS = 16  # of one policy
_NAME_CHARS = 64  # of a term
_OF_REQUEST = (
    *("prompt_tokens", "trunk_tokens", "private_tokens", "standing", "home_id", "held_s"),
    *("priority", "draw", "serial", "approximate"),
)
# Columns computed from others, and the confidence with which the hits were computed.
_DERIVED = ("requests", "queued_prefill_s", "kv_fraction", "hit_confidence")
_COLUMNS = (*(f.name for f in fields(TableFleet) if f.name != "worker_id"), *_DERIVED)


class Rejection(NamedTuple):
    """The HTTP status, error code and message with which a request is refused."""

    status: int
    code: str
    message: str


@record
class SeenWorker:
    """The data of one worker that a decision read; an unknown number is NaN."""

    worker_id: int
    cost: float  # +inf: not this one
    columns: Mapping[str, float]
    terms: Mapping[str, float]


@record
class Details:
    """The numbers that one decision read about the request, the pool and the best eight workers.
    The chosen worker is first; the others follow in the order of their costs. Workers with cost
    +inf are last, those with the most hit tokens first.
    """

    request: Mapping[str, Any]
    pool: Mapping[str, float]  # figures that are no worker's own
    workers: int  # that were considered
    seen: tuple[SeenWorker, ...]


class TermsError(ValueError):
    """Raised if the terms of a policy's costs are not valid; the text says why."""


def details_of(
    request: RequestView, fleet: FleetView, costs: Floats, chosen: int, terms: Mapping[str, Floats]
) -> Details:
    """Return the details of a decision: the data of the request, the pool and the best workers.

    `costs` and `terms` have one number for each row of `fleet`. `chosen` is the chosen row, or -1.
    """
    rows = _best(costs, fleet.hit_tokens, chosen)
    columns: dict[str, list[float]] = {}
    pool: dict[str, float] = {}
    for name in _COLUMNS:
        value = getattr(fleet, name)
        if isinstance(value, np.ndarray):
            columns[name] = value[rows].tolist()
        else:
            pool[name] = float(value)
    parts = {name: term[rows].tolist() for name, term in terms.items()}
    ids, paid = fleet.worker_id[rows].tolist(), costs[rows].tolist()
    return Details(
        request={name: getattr(request, name) for name in _OF_REQUEST},
        pool=pool,
        workers=len(fleet),
        seen=tuple(
            SeenWorker(
                ids[at],
                paid[at],
                {name: column[at] for name, column in columns.items()},
                {name: part[at] for name, part in parts.items()},
            )
            for at in range(len(rows))
        ),
    )


def checked_terms(terms: Any, rows: int) -> dict[str, Floats]:
    """Return the terms of a policy's costs by name, each as float64[rows]. Raises TermsError unless
    each term has one number for each row.
    """
    if not isinstance(terms, Mapping) or len(terms) > MAX_TERMS:
        raise TermsError(f"terms must be a mapping of at most {MAX_TERMS} names to arrays")
    checked = {}
    for name, term in terms.items():
        if not isinstance(name, str) or len(name) > _NAME_CHARS or not name.isprintable():
            raise TermsError(f"a term's name must be text of at most {_NAME_CHARS} characters")
        values = np.asarray(term)
        if values.shape != (rows,) or values.dtype.kind not in "fiub":
            raise TermsError(
                f"term {name} is {values.dtype} of shape {values.shape}; give a number for each "
                f"of the {rows} workers"
            )
        checked[name] = values.astype(np.float64)
    return checked


def _best(costs: Floats, hit_tokens: Ints, chosen: int) -> Ints:
    rows = ranked(costs, SHOWN_WORKERS + 1).tolist()
    if chosen >= 0:
        rows = [chosen, *(row for row in rows if row != chosen)]
    if len(rows) < SHOWN_WORKERS:
        known = set(rows)
        by_hits = np.argsort(-hit_tokens, kind="stable")[: 2 * SHOWN_WORKERS].tolist()
        rows += [row for row in by_hits if row not in known]
    return np.array(rows[:SHOWN_WORKERS], dtype=np.int64)


_EXPLAINED = 3  # candidates named in a decision


@record
class Stage:
    """The part of a request that one worker does: the whole request ("both"), its prefill, or its
    decode.
    """

    worker_id: int
    role: Role


@record
class Candidate:
    """A worker that a decision considered, with its cost in the policy's unit and its hit
    tokens.
    """

    worker_id: int
    cost: float
    hit_tokens: int


@record
class Ranking:
    """The costs of all workers in a decision, from which the best workers can be found later.

    Lifetime: until the best workers are looked up.
    """

    worker_ids: Sequence[int]
    costs: Floats  # its own copy: a policy may use its array again
    hit_tokens: Ints
    chosen: int  # row

    def best(self) -> tuple[Candidate, ...]:
        """Return the best three workers: the chosen one first, then the others by cost."""
        rows = [self.chosen]
        rows += [r for r in ranked(self.costs, _EXPLAINED).tolist() if r != self.chosen]
        return tuple(
            Candidate(self.worker_ids[r], float(self.costs[r]), int(self.hit_tokens[r]))
            for r in rows[:_EXPLAINED]
        )


class Decision:
    """Records why a request is sent to a worker. A decision never changes after its creation, and
    two decisions with the same values are equal; `unit`, `details` and `loaded_tokens` are neither
    compared nor recorded. The best workers are looked up only when they are first read, because few
    decisions are ever read.
    """

    __slots__ = (
        "_candidates", "approximate", "details", "hit_tokens", "loaded_tokens", "policy",
        "prompt_tokens", "reason", "unit",
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
        self.hit_tokens = hit_tokens  # expected on the chosen worker's GPU
        self.loaded_tokens = 0  # expected beyond these in its host memory or on its disk
        self.prompt_tokens = prompt_tokens
        self._candidates = candidates
        self.approximate = approximate  # hits were expected from text, not the engine's tokens
        self.unit = unit  # of the costs, where the policy says
        self.details: Details | None = None  # if an explanation was requested

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best three workers, the chosen one first."""
        if isinstance(self._candidates, Ranking):
            self._candidates = self._candidates.best()
        return self._candidates

    def trim(self, workers: int) -> None:
        """Look up the best three workers now, to free the costs of all others.

        Do nothing if the decision considered at most `workers` workers.
        """
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
    """Tells the caller to send the request to its worker or workers, to which the core has already
    charged it. If there are two stages, a prefill and a decode, both start at the same time.
    """

    request_id: int
    stages: tuple[Stage, ...]
    decision: Decision  # about the worker that answers the client
    after_s: float = 0.0  # to wait before, after another worker failed it
    prefill: Decision | None = None  # of two stages, about the first

    @property
    def worker_id(self) -> int:
        """The id of the worker that answers the client."""
        return self.stages[-1].worker_id


@dataclass(frozen=True, slots=True)
class Hold:
    """Tells the caller to keep the request; a later action dispatches or rejects it."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Tells the caller to answer the client with an error. `retry_after_s` is the number of seconds
    to wait before a retry, or None if a retry cannot help.
    """

    request_id: int
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Resync:
    """Tells the caller to request a replay of a worker's KV events from number `from_seq` on,
    because some events were missed.
    """

    worker_id: int
    from_seq: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tells the caller to stop what the worker does for this request."""

    request_id: int
    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ejected:
    """Reports that a worker failed too often and gets no new requests for a while."""

    worker_id: int
    ejected_s: float
    reason: str  # of its last failure


@dataclass(frozen=True, slots=True)
class Reinstated:
    """Reports that an ejected worker has answered and gets requests as before."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class Busied:
    """Reports that a worker is busy, so that other workers are preferred for `busy_s` seconds."""

    worker_id: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Relieved:
    """Reports that a busy worker counts as free again, because it has not reported for a while that
    it is busy.
    """

    worker_id: int
    lasted_s: float  # from the first time that it said so to the end of the last spell


@dataclass(frozen=True, slots=True)
class Abandon:
    """Tells the caller to send the requests of a silent worker to other workers, except those whose
    answers have begun.
    """

    worker_id: int


@dataclass(frozen=True, slots=True)
class Panic:
    """Reports that most workers of a base model stopped answering probes at the same time, or that
    most answer again. While most do not answer, no request of the model moves to another worker.
    """

    model: str
    silent: int
    workers: int  # of it that are ready
    begins: bool


@dataclass(frozen=True, slots=True)
class Doubted:
    """Reports that a worker's KV events are wrong or useless, so that the cache hits which they
    promise count less or not at all.
    """

    worker_id: int
    # overflow: it reports more blocks than fit; refuted: answers find fewer; useless: no event can
    # be used; sizes: its blocks have several sizes.
    reason: Literal["overflow", "refuted", "useless", "sizes"]
    confidence: float  # share of its hits that counts


@dataclass(frozen=True, slots=True)
class Followed:
    """Reports the block size that the router reads from a worker's KV events. The core reports it
    if it differs from the size that the worker reports about itself, or if the events were unusable
    before.
    """

    worker_id: int
    block_size: int
    told_block_size: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Reports that a worker's KV events can be trusted again, because the worker's answers confirm
    them.
    """

    worker_id: int


@dataclass(frozen=True, slots=True)
class Others:
    """Reports that clients other than this router send many requests to the workers, too, or that
    they no longer do.
    """

    share: float  # of all that workers reported, 0..1
    many: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Tells the caller to probe a worker at once, and to pass the result to the core as a `Probed`
    fact.
    """

    worker_id: int
    within_s: float | None = None  # how long it may take; None: as long as any probe


Action = (
    Dispatch
    | Hold
    | Reject
    | Resync
    | Cancel
    | Ejected
    | Reinstated
    | Busied
    | Relieved
    | Abandon
    | Panic
    | Doubted
    | Confirmed
    | Followed
    | Others
    | Probe
)


SECONDS = "s"  # the unit of policies whose costs are the seconds until the first token


def runner_up(decision: Decision) -> Candidate | None:
    """Return the cheapest of the workers that were not chosen, or None if there are none."""
    return decision.candidates[1] if len(decision.candidates) > 1 else None


def regret_s(decision: Decision, first_token_s: float | None) -> float | None:
    """Return the seconds by which the first token came later than the runner-up's cost predicts.

    The runner-up is the best worker that was not chosen. If the result is above 0, the runner-up
    would have been faster, by the decision's own estimate. Return None if the first token's time is
    unknown, if there was no runner-up, or if the policy's costs are not in seconds.
    """
    other = runner_up(decision)
    if decision.unit != SECONDS or other is None or first_token_s is None:
        return None
    return first_token_s - other.cost


def regret_hit_tokens(decision: Decision, cached_tokens: int | None) -> int | None:
    """Return the prompt tokens that the runner-up had cached beyond the chosen worker; 0 or more.

    The runner-up's tokens are those that the decision expected; the chosen worker's are those that
    it reported. Return None if a number is unknown. Also return None if the prompt was hashed as
    text, because then its token counts are not comparable to the worker's.
    """
    other = runner_up(decision)
    if other is None or cached_tokens is None or decision.approximate:
        return None
    return max(other.hit_tokens - cached_tokens, 0)

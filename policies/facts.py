"""Facts about requests, workers and caches, which the core and policies with a memory receive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from policies.contract import Hashes, Standing
from policies.record import record

Tier = Literal["gpu", "host", "disk"]
BlockNames = tuple[int | bytes, ...] | Hashes  # an array stands for the same numbers as ints


@record
class Stored:
    """Fact: blocks were stored in a worker's cache; `hashes` are the engine's names of the blocks.

    `chain` has this router's chain hashes of the blocks, if the source of the fact knows them, as a
    recording does. Then `tokens`, `seed` and `extras` are not read and may be empty. `hashes` may
    have the same values as `chain`, or be the same array. If both `tokens` and `chain` are missing,
    the router knows the blocks already, and they were stored in one more tier. `group` is the cache
    group of a model with several attention types; None means that there is only one group. Only one
    group counts as cached blocks: the first that is reported to have full attention, and until then
    group 0. `window` is set for a group that limits how many of these blocks can be reused: it is
    the number of tokens of the group's sliding window, or 0 if the group keeps states. The blocks
    of such a group have the same names as in full attention, and come without chain and tokens.
    """

    hashes: BlockNames
    parent: int | bytes | None
    tokens: tuple[int, ...] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
    block_size: int
    tier: Tier = "gpu"
    seed: int = 0  # chain seed for the LoRA adapter and salt that the event names
    chain: Hashes | None = None
    extras: tuple[bytes, ...] = ()  # hashed after the tokens of each block (images); may be empty
    group: int | None = None
    full_attention: bool = False
    window: int | None = None


@record
class Removed:
    """Fact: blocks were evicted from a worker's cache."""

    hashes: BlockNames
    tier: Tier = "gpu"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """Fact: the whole cache of a worker was reset."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """The blocks of a worker's cache, as known to a router before batch `next_seq` of KV events."""

    next_seq: int
    live_seq: int  # highest batch number received live since the publisher started; -1: none
    digest: int  # XXH3-64 of the payload of the batch before `next_seq`; 0: unknown
    exact: bool  # no event is missing in it
    turned_over: bool  # since a missed event, as many blocks were stored as the worker holds
    blocks: bytes  # `WorkerBlocks.dump`


@dataclass(frozen=True, slots=True)
class KvCopied:
    """Fact: a peer router sent its knowledge of a worker's cache, which replaces this
    router's own.
    """

    now_s: float
    worker_id: int
    snapshot: CacheSnapshot


@dataclass(frozen=True, slots=True)
class KvHeard:
    """Fact: a worker's KV events begin or stop to reach this router, directly or through a peer
    router.

    `heard` is True if the events reach this router. `severed` is True if a lost connection is back,
    and it is unknown which events were missed and if the engine was restarted.
    """

    now_s: float
    worker_id: int
    heard: bool
    severed: bool = False


Role = Literal["both", "prefill", "decode"]


@record
class Identity:
    """The ids that a client gives for the agent that sends a request, unique within its tenant.

    An agent's client runs a main agent, its sub-agents and side requests, such as one for a title.
    Each agent's conversation is a session of its own (`Arrival.session`). All sessions that one
    person started at once are a group. The ids are the client's own texts.
    """

    # The person's session: its main agent, sub-agents, side requests. Perhaps a main agent's own.
    group: str | None = None
    parent: str | None = None  # group or session of the agent that started this one; None: none
    # Requests whose prompts begin alike, by the client's word (OpenAI's `prompt_cache_key`).
    cache_group: str | None = None
    user: str | None = None  # the person, for fairness only; perhaps a whole chat page's
    final: bool = False  # this is the last request of its session


UNIDENTIFIED = Identity()


def user_id_of(session: str | None, identity: Identity) -> str | None:
    """Return the id that all requests of one person have in common, as far as the client says.

    This is the group, else the session, which is then a group of its own, else the cache group. The
    user does not count: a chat page may have one user for everybody. Return None if the client says
    nothing.
    """
    if identity is UNIDENTIFIED:
        return session
    return identity.group or session or identity.cache_group


@record
class Arrival:
    """Fact: a request arrived at the router.

    `chains` has the chain hashes of the prompt for each block size that the model's workers use.
    `session` is the id of the agent's conversation that the prompt belongs to, if the client gives
    one.
    """

    now_s: float
    request_id: int  # unique while the process runs
    model: str
    prompt_tokens: int  # of all its prompts together
    chains: Mapping[int, Hashes]  # block size in tokens -> chain hashes of the full blocks
    approximate: bool = False  # chains of text blocks (policies.contract.RequestView)
    max_output_tokens: int | None = None
    session: str | None = None
    tenant: str | None = None
    priority: int = 0
    stream: bool = True  # False: no first token is seen before the end
    longest_prompt_tokens: int | None = None  # of several prompts; None where there is one only
    weight: float = 1.0  # its tenant's share where several wait: twice as much gets twice as much
    deadline_s: float | None = None  # after this time no client wants its answer; same clock
    needs: str | None = None  # a path that not every engine has; None: each has it
    splits: bool = False  # one worker may prefill it and another one decode
    only: int | None = None  # the only worker that may get it, even if it fails there
    hold_s: float | None = None  # longest wait for a worker; None: as long as others
    among: tuple[int, ...] | None = None  # the only workers that may have it; None: any
    revision: str | None = None  # revision of the model whose workers are preferred; None: any
    identity: Identity = UNIDENTIFIED
    expected_output_tokens: int | None = None  # as the client expects; None: unknown


@record
class Dispatched:
    """Fact: a request was sent to a worker, for its prefill, its decode, or both (its leg).

    Only policies with a memory receive this fact. If the decode leg follows the prefill leg, a
    `Finish` ends the prefill leg before the decode leg is dispatched. If both legs start together,
    a `Prefilled` fact ends the prefill leg, or a `Failure` whose `leg` is "prefill".
    """

    now_s: float
    request_id: int
    worker_id: int
    hit_tokens: int
    uncached_tokens: int
    chain: Hashes
    session: str | None = None  # its tenant's: another one may use the same name
    tenant: str | None = None
    leg: Role = "both"
    group: str | None = None  # as in the request's `Identity`
    parent: str | None = None


@record
class FirstToken:
    """Fact: the first byte of an answer's body arrived, so the request's prefill is over."""

    now_s: float
    request_id: int


@record
class Prefilled:
    """Fact: a worker has finished the prefill of a request that another worker decodes.

    If prefill and decode started together, the decode worker has the KV or will soon have it.
    `cached_tokens` is the number of prompt tokens that were cached; None if the worker did not
    report it.
    """

    now_s: float
    request_id: int
    cached_tokens: int | None = None


@record
class Progress:
    """Fact: a streaming answer has given `output_tokens` tokens so far."""

    now_s: float
    request_id: int
    output_tokens: int


@record
class Finish:
    """Fact: an answer is complete. The token counts are those that the worker reported, or None."""

    now_s: float
    request_id: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    refused: bool = False  # a 4xx: it concerns the request, not the worker's health


@record
class Failure:
    """Fact: a dispatch ended without a complete answer.

    `blame` is "client" (the client left, or its request was refused), "worker" (connect error,
    early close, 5xx, invalid answer), or "busy" (no connection to the worker was free, or its queue
    was full). "busy" does not count against the worker's health. `busy_s` is a number if the worker
    refused the request as overloaded: the seconds for which it wants no more requests, or 0 if it
    named no time. `retry` asks the core to send the request to another worker. It is set if the
    client has received nothing yet, or if another worker can continue the answer. `rest` is then
    the request that remains, under the same number; its prompt includes the part of the answer that
    was sent already. If the prefill leg and the decode leg of a request started together, `leg`
    names the leg that failed: the one that answers, the prefill, or the pair if the failed one is
    unknown. Both legs are then over, with one exception: after a "prefill" failure without `retry`,
    the answer has begun and continues. `runs_on` is True if the client left and the worker may
    still compute. The request stays charged to the worker until the computation should be over.
    """

    now_s: float
    request_id: int
    blame: Literal["client", "worker", "busy"]
    retry: bool = False
    reason: str = ""
    rest: Arrival | None = None  # replaces the first arrival; None: the whole request remains
    leg: Literal["answer", "prefill", "pair"] = "answer"
    runs_on: bool = False
    busy_s: float | None = None


@record
class LoadReport:
    """A worker's own report of its load, read from its metrics."""

    now_s: float
    worker_id: int
    running: int
    waiting: int
    kv_used_tokens: float  # NaN if the worker does not report it
    emptied: int = 0  # number of times that it emptied its cache on request since it started
    # When its engine's process began, seconds since the epoch, by its own account; NaN: it does not
    # say. Another life of the engine is told of by a `WorkerChange`.
    started_s: float = math.nan


@record
class KvEvents:
    """One numbered batch of a worker's KV events.

    `source` is "live" for a batch as it was published, "replay" for a batch that the router asked
    for after a gap, or "snapshot". A snapshot is the worker's whole cache as of batch `seq`, and
    replaces all that the router knew. `events` is a tuple, or a sequence that creates its events
    when it is read. `digest` is the XXH3-64 hash of the published payload, or 0 if unknown; it
    distinguishes batches with the same number from different publishers. `unreadable` is True if
    the batch could be read neither live nor in a replay; then `events` is empty.
    """

    now_s: float
    worker_id: int
    seq: int
    events: Sequence[KvEvent]
    source: Literal["live", "replay", "snapshot"] = "live"
    digest: int = 0
    unreadable: bool = False


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """The replay or the snapshot that the router asked for is complete.

    `answered` is True if the publisher of KV events served the replay, and False after a timeout.
    `began_anew` is True if the publisher no longer has any batch that it published before, so that
    it must have been restarted.
    """

    now_s: float
    worker_id: int
    answered: bool
    began_anew: bool = False


Suspension = Literal["asleep", "paused"]


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Fact: a worker joined, changed, or left.

    `state` is "ready" if the worker takes requests, "draining" if it only finishes its requests,
    "down" if it failed its health check or was ejected, and "gone" if it was removed for good.
    `suspended` is set for a worker that is down while its engine and its KV events continue. Its
    value "asleep" means that the worker's cache is empty. "paused" means that the cache may be
    empty, which vLLM reports only with the engine's next step.
    """

    now_s: float
    worker_id: int
    state: Literal["ready", "draining", "down", "gone"]
    spec: WorkerFacts | None = None  # set if it joins or is recognized again
    saved: CacheSnapshot | None = None  # from an earlier router; it must still be verified
    suspended: Suspension | None = None


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The description of a worker, without its load.

    The prefill rate and the step time are starting values, which measurements replace.
    """

    name: str  # shown to people; the URL for HTTP workers
    models: tuple[str, ...]
    block_size: int
    role: Role = "both"
    group: str | None = None  # workers of a group exchange KV; None: this worker does not
    serves_alone: bool = True  # it can prefill and decode a request, whatever its role
    concurrent: bool = False  # both legs of a request start at once, and its two workers connect
    keeps_prefixes: bool = True  # prompts that it decoded for prefill workers stay in its cache
    kv_capacity_tokens: float = float("nan")
    max_model_tokens: int | None = None
    prefill_tokens_per_s: float = 15_000.0
    step_s: float = 0.015
    max_requests: float = float("nan")
    max_queued_tokens: float = float("nan")
    max_kv_fraction: float = float("nan")
    weight: float = 1.0
    has_events: bool = True  # False: its cache is mirrored from our own dispatches only
    keeps_copies: bool = False  # it keeps several copies of equal blocks, each with its own events
    adapters: frozenset[str] = frozenset()  # those of `models` that are LoRA adapters
    lacks: frozenset[str] = frozenset()  # paths that it does not serve
    denied: frozenset[str] = frozenset()  # those of `models` that it answered not to have
    revision: str | None = None  # of what it serves, by its label or its engine's version


@dataclass(frozen=True, slots=True)
class Probed:
    """Fact: a worker answered, or failed to answer, a probe that the core asked for with
    `Probe`.
    """

    now_s: float
    worker_id: int
    well: bool


@dataclass(frozen=True, slots=True)
class Silence:
    """Fact: a worker has left `probes` successive probes of the router unanswered; 0 if it answers
    again.

    The worker may be slow, stopped or dead. If no other worker is silent, those of its requests
    whose first byte has not come move to other workers after `allowed` unanswered probes.
    """

    now_s: float
    worker_id: int
    probes: int
    allowed: int = 2


@record
class PeerDispatched:
    """A peer router, which shares workers with this router, charged a request to a worker.

    `arrival` describes the request as the peer router received it, but with a negative request id
    and a time on this router's clock. Its `chains` are empty if this router can learn nothing from
    them.
    """

    now_s: float
    arrival: Arrival
    worker_id: int
    uncached_tokens: int
    standing: Standing = "new"  # state of its session, as the peer sees it
    late: bool = False  # dispatched before this message: its worker may have reported it


@record
class PeerFirstToken:
    """Fact: the prefill of a peer router's request is over."""

    now_s: float
    request_id: int


@record
class PeerProgress:
    """Fact: the answer to a peer router's request has `output_tokens` tokens so far."""

    now_s: float
    request_id: int
    output_tokens: int


@record
class PeerEnded:
    """Fact: a peer router's request left its worker; `finish` is set if the request was
    answered.
    """

    now_s: float
    request_id: int
    finish: Finish | None = None


def legs_over(fact: Finish | Failure | Prefilled) -> tuple[Role, ...]:
    """Return the legs (prefill, decode or both) of a request that are over after a fact.

    The result is "prefill" alone, or all of "both", "prefill" and "decode", although some of these
    may never have been dispatched. Policies that remember the dispatch of each leg use the result
    to forget it.
    """
    if type(fact) is Prefilled or (
        type(fact) is Failure and fact.leg == "prefill" and not fact.retry
    ):
        return ("prefill",)
    return ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Tick:
    """Fact: time has passed, so the core checks for expired state and places held
    requests again.
    """

    now_s: float


PeerFact = PeerDispatched | PeerFirstToken | PeerProgress | PeerEnded

Fact = (
    Arrival
    | Dispatched
    | FirstToken
    | Prefilled
    | Progress
    | Finish
    | Failure
    | LoadReport
    | KvEvents
    | ReplayEnd
    | KvCopied
    | KvHeard
    | WorkerChange
    | Probed
    | Silence
    | PeerFact
    | Tick
)

"""Facts about requests, workers and caches, for the core and for policies with a memory."""

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
    """Blocks were stored in a worker's cache; `hashes` are the engine's own names of them.

    `chain` are this router's chain hashes of the blocks, if the source knows them (replays and
    recordings). Then `tokens`, `seed` and `extras` are not read and may be empty. Names may be
    equal to chain hashes, and an array of names may be the array `chain` itself. Without tokens and
    chain, the blocks are known already and were stored in another tier.

    A hybrid model reports the blocks of each of its cache groups, of which one group counts: the
    first that is reported to have full attention, and until then group 0. None means that there is
    only one.
    """

    hashes: BlockNames
    parent: int | bytes | None
    tokens: tuple[int, ...] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
    block_size: int
    tier: Tier = "gpu"
    seed: int = 0  # chain seed of the LoRA adapter and salt the event names
    chain: Hashes | None = None
    extras: tuple[bytes, ...] = ()  # hashed after the tokens of each block (images); or none
    group: int | None = None
    full_attention: bool = False


@record
class Removed:
    """Blocks were evicted from a worker's cache."""

    hashes: BlockNames
    tier: Tier = "gpu"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache of a worker was reset."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """A router's knowledge of a worker's cache, before batch `next_seq` of its KV events."""

    next_seq: int
    live_seq: int  # the highest number of this life of the publisher that came live; -1: none
    digest: int  # XXH3-64 of the payload of the batch before `next_seq`; 0 where it is not known
    exact: bool  # no event is missing in it
    turned_over: bool  # as much was stored since one was missed as the worker holds
    blocks: bytes  # `WorkerBlocks.dump`


@dataclass(frozen=True, slots=True)
class KvCopied:
    """A peer router sent its knowledge of a worker's cache, which replaces this router's own."""

    now_s: float
    worker_id: int
    snapshot: CacheSnapshot


@dataclass(frozen=True, slots=True)
class KvHeard:
    """A worker's KV events, read by a peer router, reach this router, or no longer do.

    `severed` is True if the connection is back, but nobody knows which events were published
    meanwhile, or whether the engine is still the same.
    """

    now_s: float
    worker_id: int
    heard: bool
    severed: bool = False


Role = Literal["both", "prefill", "decode"]


@record
class Arrival:
    """A request came in.

    `chains` holds one chain for each block size of its pool.
    """

    now_s: float
    request_id: int  # unique for the life of the process
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
    deadline_s: float | None = None  # when nobody wants its answer any more, on the same clock
    needs: str | None = None  # a path that not every engine has; None: each has it
    splits: bool = False  # one worker may prefill it and another one decode
    only: int | None = None  # the one worker that may have it, whatever becomes of it there
    hold_s: float | None = None  # longest wait for a worker; None: as long as others
    among: tuple[int, ...] | None = None  # the only workers that may have it; None: any


@record
class Dispatched:
    """The dispatch of a request, or of its prefill or decode leg, as policies with a memory see it.

    If the two legs follow each other, a `Finish` ends the prefill leg before the decode leg is
    dispatched. If they start together, a `Prefilled` fact ends the prefill leg, or a `Failure`
    whose `leg` is "prefill".
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


@record
class FirstToken:
    """The first byte of an answer's body arrived, so the prefill of its request is over."""

    now_s: float
    request_id: int


@record
class Prefilled:
    """A worker has finished the prefill leg of a request.

    If both legs started together, the decode worker has the KV, or will have it. `cached_tokens` is
    the number of prompt tokens that were cached; None if the worker did not report it.
    """

    now_s: float
    request_id: int
    cached_tokens: int | None = None


@record
class Progress:
    """A streaming answer has given `output_tokens` tokens so far."""

    now_s: float
    request_id: int
    output_tokens: int


@record
class Finish:
    """An answer is complete.

    Token counts are those that the worker reported, or None.
    """

    now_s: float
    request_id: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    refused: bool = False  # a 4xx: about the request, and no word about the worker's health


@record
class Failure:
    """A dispatch ended without an answer.

    `blame` is "client" (the client left, or its request was refused), "worker" (connect error,
    early close, 5xx, garbage), or "busy" (no connection to the worker was free, or its queue was
    full, which says nothing about its health). `busy_s` is a number if the worker refused the
    request because it is overloaded: the seconds for which it asked for no more requests, or 0 if
    it named no time.

    `retry` asks the core for another worker: before the first byte reached the client, or if
    another worker can continue the answer. `rest` is then the request that remains, under the same
    number; its prompt includes what was answered already.

    If both legs of a request started together, `leg` names the worker at fault: the one that
    answers, the one that prefills, or the pair if nobody can tell. Both legs are over then. The
    exception is a "prefill" failure without `retry`: the answer has begun and continues.

    `runs_on` is True if the client left and the worker may still compute. The request stays charged
    until the computation should be over.
    """

    now_s: float
    request_id: int
    blame: Literal["client", "worker", "busy"]
    retry: bool = False
    reason: str = ""
    rest: Arrival | None = None  # in the first arrival's place; None: all of it is still to do
    leg: Literal["answer", "prefill", "pair"] = "answer"
    runs_on: bool = False
    busy_s: float | None = None


@record
class LoadReport:
    """A worker's own report of its load, as scraped."""

    now_s: float
    worker_id: int
    running: int
    waiting: int
    kv_used_tokens: float  # NaN when the worker does not say
    emptied: int = 0  # times it was asked to empty its cache since it began, and did
    # When its engine's process began, seconds since the epoch, by its own account; NaN: it does not
    # say. Another life of the engine is told of by a `WorkerChange`.
    started_s: float = math.nan


@record
class KvEvents:
    """One numbered batch of a worker's KV events.

    `source` is "live" as published, "replay" if asked for after a gap, or "snapshot": the worker's
    whole cache as of `seq`, which replaces what was known. `events` is a tuple, or a sequence that
    creates its events when it is read. `digest` is the XXH3-64 of the payload as published, or 0 if
    unknown; it distinguishes batches of equal numbers from different publishers. `unreadable` is
    True if the batch could be read neither live nor in a replay; then `events` is empty.
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
    """A replay, or a snapshot if the worker has one, is complete.

    `answered` is True if the publisher served it, and False after a timeout. `began_anew` is True
    if the publisher had nothing left of what it had published, so that it is another one.
    """

    now_s: float
    worker_id: int
    answered: bool
    began_anew: bool = False


Suspension = Literal["asleep", "paused"]


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """A worker joined, changed, or left.

    `state` is "ready" if the worker takes requests, "draining" if it only finishes its own, "down"
    if it failed its health check or was ejected, and "gone" if it was removed for good. A worker
    that is down may be `suspended`: its engine and its events continue. "asleep" means that its
    cache is empty. "paused" means that it may be empty, which vLLM reports only with the engine's
    next step.
    """

    now_s: float
    worker_id: int
    state: Literal["ready", "draining", "down", "gone"]
    spec: WorkerFacts | None = None  # given when it joins or is recognized anew
    saved: CacheSnapshot | None = None  # by a router before this one; to be proven
    suspended: Suspension | None = None


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The description of a worker, without its load.

    Rates are the starting values of calibration.
    """

    name: str  # shown to people; the URL for HTTP workers
    models: tuple[str, ...]
    block_size: int
    role: Role = "both"
    group: str | None = None  # its workers take KV from each other; None: it takes and gives none
    serves_alone: bool = True  # whatever its role: it can prefill and decode a request
    concurrent: bool = False  # both legs of a request begin at once, and its workers meet
    keeps_prefixes: bool = True  # what it decoded for others is found in its cache again
    kv_capacity_tokens: float = float("nan")
    max_model_tokens: int | None = None
    prefill_tokens_per_s: float = 15_000.0
    step_s: float = 0.015
    max_requests: float = float("nan")
    max_queued_tokens: float = float("nan")
    max_kv_fraction: float = float("nan")
    weight: float = 1.0
    has_events: bool = True  # False: its cache is mirrored from our own dispatches only
    keeps_copies: bool = False  # of equal blocks, each with events of its own
    adapters: frozenset[str] = frozenset()  # those of `models` that are LoRA adapters
    lacks: frozenset[str] = frozenset()  # paths that it has not got
    denied: frozenset[str] = frozenset()  # of `models`, those that it says not to have


@dataclass(frozen=True, slots=True)
class Probed:
    """A worker answered a probe that the core asked for (`Probe`), or failed to."""

    now_s: float
    worker_id: int
    well: bool


@dataclass(frozen=True, slots=True)
class Silence:
    """A worker left `probes` of the router's own probes in a row unanswered; 0: it answers again.

    The worker may be slow, stopped or dead. If it is silent alone, its requests without a first
    byte move to other workers after `allowed` unanswered probes.
    """

    now_s: float
    worker_id: int
    probes: int
    allowed: int = 2


@record
class PeerDispatched:
    """A peer, which is another router of the same workers, charged a request to a worker.

    `arrival` is the request as the peer had it, with a negative number and the time of this
    router's clock. It has no chains if nothing can be learned from them.
    """

    now_s: float
    arrival: Arrival
    worker_id: int
    uncached_tokens: int
    standing: Standing = "new"  # of its session, by the peer
    late: bool = False  # it was there before this was told: its worker may have reported it


@record
class PeerFirstToken:
    """The prefill of a peer's request is over."""

    now_s: float
    request_id: int


@record
class PeerProgress:
    """The answer to a peer's request has `output_tokens` tokens so far."""

    now_s: float
    request_id: int
    output_tokens: int


@record
class PeerEnded:
    """A peer's request left its worker; `finish` is set if the request was answered."""

    now_s: float
    request_id: int
    finish: Finish | None = None


def legs_over(fact: Finish | Failure | Prefilled) -> tuple[Role, ...]:
    """Return the legs of a request that this fact ends.

    Some of these legs may never have been dispatched. Policies that remember dispatches by request
    and leg use the result to forget them.
    """
    if type(fact) is Prefilled or (
        type(fact) is Failure and fact.leg == "prefill" and not fact.retry
    ):
        return ("prefill",)
    return ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, so that expiries and held requests must be checked."""

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

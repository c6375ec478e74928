"""What happens to a pool and its workers' caches, for the core and for policies with a memory."""

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
    """Blocks became resident; `hashes` are the engine's own names of them.

    `chain`: our own chain hashes of these blocks, where the source knows them (replays and
    recordings); `tokens`, `seed` and `extras` are not read then and may be left empty. Names may
    be equal to chain hashes, and an array of names may be the array `chain` itself. Neither
    tokens nor a chain: blocks that are known already came to another tier.

    A hybrid model tells the blocks of each of its cache groups. Those of one group count: of the
    first that is told to be one of full attention, until then of group 0; None: there is one only.
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
    """Blocks were evicted."""

    hashes: BlockNames
    tier: Tier = "gpu"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was reset."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """What a router knows of a worker's cache; batch `next_seq` of its events goes on from it."""

    next_seq: int
    live_seq: int  # the highest number of this life of the publisher that came live; -1: none
    digest: int  # XXH3-64 of the payload of the batch before `next_seq`; 0 where it is not known
    exact: bool  # no event is missing in it
    turned_over: bool  # as much was stored since one was missed as the worker holds
    blocks: bytes  # `WorkerBlocks.dump`


@dataclass(frozen=True, slots=True)
class KvCopied:
    """What a peer, another router, knows of a worker's cache, which replaces what we knew."""

    now_s: float
    worker_id: int
    snapshot: CacheSnapshot


@dataclass(frozen=True, slots=True)
class KvHeard:
    """A worker's events, which reach us through a peer, are heard; or are heard no more, and
    what is known is as of then.

    `severed`: the connection is back, and nobody can tell what was published meanwhile, nor whether
    it is still the same engine.
    """

    now_s: float
    worker_id: int
    heard: bool
    severed: bool = False


Role = Literal["both", "prefill", "decode"]


@record
class Arrival:
    """A request came in. `chains` holds one chain per block size of its pool."""

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
    """The first byte of the answer's body arrived: its prefill is over."""

    now_s: float
    request_id: int


@record
class Prefilled:
    """The worker that was to prefill a request for another one has done so.

    Where both legs were begun at once, the other one has its KV, or will have.
    `cached_tokens` of the prompt were in its cache; None: it did not say.
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
    """The answer is complete. Token counts as the worker reported them; None if it did not."""

    now_s: float
    request_id: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    refused: bool = False  # a 4xx: about the request, and no word about the worker's health


@record
class Failure:
    """A dispatch ended without an answer.

    `blame` is "client" (it left, or its request was refused), "worker" (connect error, early
    close, 5xx, garbage), or "busy" (no connection to the worker was free, or its queue was full,
    which says nothing of its health). `busy_s`: the worker refused the request because it has
    more than it takes just now, and asked for so many seconds without another one; 0: it named no
    time; None: it did not refuse it so. `retry` asks the core for another worker: before the first
    byte reached the client, or where another worker can go on with the answer. What it shall do
    then is `rest`, under the same number: the prompt has grown by what was answered already.

    Where both legs of a request were begun at once, `leg` says whose fault it is: of the worker
    that answers, of the one that prefills, or of the pair, where nobody can tell. Both legs are
    over then, but for a "prefill" that fails without a `retry`: the answer has begun, and goes on.

    `runs_on`: the client left, and the worker may compute on though it was told: the request stays
    charged until that should be over.
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
    """A worker's own account of its load, as scraped."""

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

    `source`: "live" as published, "replay" asked for after a gap, or "snapshot": the worker's
    whole cache as of `seq`, which replaces what was known. `events` is a tuple, or a sequence
    that makes its events when it is gone through. `digest`: XXH3-64 of the payload as published,
    which tells one publisher's batch from the equally numbered one of another; 0 where it is not
    known. `unreadable`: neither as published nor as replayed could it be read, and `events` has
    none of them.
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
    """A replay (and a snapshot, where the worker has one) gave all it could.

    `answered`: the publisher served it; False when nobody did before the timeout. `began_anew`: it
    had nothing left of what it had published before, so it is another one.
    """

    now_s: float
    worker_id: int
    answered: bool
    began_anew: bool = False


Suspension = Literal["asleep", "paused"]


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """A worker joined, changed, or left.

    `state` "ready" takes requests, "draining" finishes its own, "down" failed its health check
    or was ejected, "gone" is removed for good. One that is down may be `suspended`: its engine
    lives on, and so do its events. "asleep": its cache is empty; "paused": it may be, which vLLM
    tells with the engine's next step only.
    """

    now_s: float
    worker_id: int
    state: Literal["ready", "draining", "down", "gone"]
    spec: WorkerFacts | None = None  # given when it joins or is recognized anew
    saved: CacheSnapshot | None = None  # by a router before this one; to be proven
    suspended: Suspension | None = None


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What is known of a worker besides its load. Rates are the starting values of calibration."""

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
    """A worker was asked whether it is well, because the core wanted to know (`Probe`)."""

    now_s: float
    worker_id: int
    well: bool


@dataclass(frozen=True, slots=True)
class Silence:
    """A worker left so many of the router's own probes in a row unanswered; 0: it answers again.

    It may be slow, or stopped, as well as dead. Where it is alone with that, what waits there for a
    first byte goes elsewhere after `allowed` of them.
    """

    now_s: float
    worker_id: int
    probes: int
    allowed: int = 2


@record
class PeerDispatched:
    """Another router of the same workers, a peer, charged a request to one of them.

    `arrival` is as the peer had it, but for the number, which is ours and below zero, and the
    time, which is by our clock. It has no chains where nothing is to be learned from them.
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
    """A peer's request is at its worker no more; with a `finish` where it was answered."""

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
    """Time passed. Expiries and held requests are looked at again."""

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

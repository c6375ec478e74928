"""Recognizes the engine behind a worker's URL: its kind, models, block size, cache capacity and KV
event endpoints.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from policies.facts import Role, WorkerFacts
from router.body.legs import BootstrapAddress
from router.engines import triton
from router.engines.adapter import (
    HEALTH,
    MAX_MODELS,
    NO_VERSION,
    Card,
    EngineVersion,
    HealthCheck,
    Interview,
    LoadReader,
    Profile,
    UnrecognizedError,
    cards,
)
from router.engines.spec import (
    BIND,
    MAX_KV_TOKENS,
    MAX_REVISION_CHARACTERS,
    POLL,
    WorkerSpec,
)
from router.engines.table import ADAPTERS, TRANSFERS
from router.engines.triton_inputs import Roles
from router.engines.trtllm import EVENTS_PATH
from router.events.sources import (
    NO_OTHERS,
    EventHosts,
    EventSource,
    PollSource,
    ZmqSource,
)

BLOCK_SIZES = range(1, 4_097)  # tokens, as in a worker's options
_GUESSED_BLOCK = 64  # tokens, at least, of blocks of which no events are received
_SHOWN_MODELS, _SHOWN_CHARACTERS = 5, 100  # in a line of the log


class NoSuchRankError(UnrecognizedError):
    """Raised when the engine does not have the requested rank; it carries the `ranks` that the
    engine has.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        known = ", ".join(map(str, ranks[:16]))
        super().__init__(f"it has no rank {rank}; its ranks: {known}")
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class Recognized:
    """A recognized worker: its engine's kind, facts and addresses."""

    kind: str  # a key of `ADAPTERS`
    facts: WorkerFacts
    source: EventSource | None  # where its events are; None: it has none
    loads: LoadReader | None = None  # how to read its load; None: it reports none
    health: HealthCheck = HEALTH
    ranks: tuple[int, ...] = (0,)  # all ranks behind its URL; empty: unknown
    address: int | None = None  # the engine's number of this rank; None: it is the only one
    advice: str = ""  # to its operator
    sized: bool = True  # it reported its block size
    pause_url: str | None = None  # reports whether it is paused; None: it cannot be paused
    own_group: str | None = None  # the group from which it could take KV, by engine and version
    own_role: Role = "both"  # that it was started for
    transfer: str = ""  # how KV passes to it and from it, of `router.engines.table.TRANSFERS`
    bootstrap: BootstrapAddress | None = None  # where workers that decode meet it
    caches_decoded: bool = True  # KV that it decodes for others is found in its cache again
    roles: Mapping[str, Roles] = field(default_factory=dict)  # of KServe's inputs, by model
    grpc: str | None = None  # HOST:PORT where it speaks KServe's gRPC
    silent: frozenset[str] = frozenset()  # addresses besides its own that did not answer
    kv_block_tokens: int | None = None  # of its own blocks, which ours may be several of
    refused_models: int = 0  # models that it lists beyond those that are served
    events_refused: bool = False  # it names another host for its events, so they are not read
    caches_prefixes: bool = True  # False: its prefix caching is off
    leaves_out_groups: bool = False  # its events do not tell of its windows or states
    model_path: str | None = None  # the engine's own name of its model, by which it names images
    reported_version: EngineVersion = (
        NO_VERSION  # its engine's version, as reported when it was recognized
    )

    def __str__(self) -> str:
        """Return a line of text for people."""
        facts = self.facts
        shown = [repr(name)[1:-1][:_SHOWN_CHARACTERS] for name in facts.models[:_SHOWN_MODELS]]
        if more := len(facts.models) - len(shown):
            shown.append(f"{more} more")
        capacity = facts.kv_capacity_tokens
        tokens = "unknown" if math.isnan(capacity) else f"{capacity:.0f}"
        role = "" if facts.role == "both" else f", role {facts.role} in group {facts.group!r}"
        return (
            f"kind {self.kind}, models {' '.join(shown)}, block size {facts.block_size}, "
            f"KV tokens {tokens}, events {'yes' if facts.has_events else 'no'}{role}"
        )


async def recognize(
    http: aiohttp.ClientSession,
    spec: WorkerSpec,
    timeout_s: float,
    event_hosts: EventHosts = NO_OTHERS,
    most_models: int = MAX_MODELS,
) -> Recognized:
    """Ask the engine at a worker's URL for its facts. Without a rank in `spec`, all ranks of the
    engine count as one worker.

    At most `most_models` of its models are served. KV events are read only from the worker's own
    host or from `event_hosts`. Raises UnrecognizedError, WireError, aiohttp.ClientError or
    TimeoutError.
    """
    talk = Interview(http, spec, timeout_s)
    listed, own = await _models(talk)
    models = _served(listed, most_models)
    kind, profile = await _profile(talk, own or spec.kind)
    source = _source(spec, profile)
    if refused := await _refused(talk, source, event_hosts):
        source = None
    facts = WorkerFacts(
        name=spec.name,
        models=(spec.model,) if spec.model else tuple(m.id for m in models),
        block_size=_block_size(spec, profile, source is not None),
        kv_capacity_tokens=_capacity(spec, profile),
        max_model_tokens=min(filter(None, (m.max_model_len for m in models)), default=None),
        has_events=source is not None,
        keeps_copies=profile.keeps_copies,
        adapters=frozenset(m.id for m in models if m.parent is not None),
        lacks=ADAPTERS[kind].lacks | profile.lacks,
    )
    recognized = Recognized(
        kind,
        facts,
        source,
        profile.loads,
        profile.health,
        profile.ranks,
        _address(spec, profile),
        refused or _advice(spec, profile),
        profile.block_size is not None,
        profile.pause_url,
        _own_group(kind, spec, profile),
        profile.role,
        spec.transfer or kind,
        profile.bootstrap,
        profile.keeps_prefixes,
        profile.roles,
        profile.grpc,
        frozenset(talk.silent),
        _own_block_size(spec, profile),
        0 if spec.model else len(listed) - len(models),
        bool(refused),
        profile.caches_prefixes,
        profile.leaves_out_groups,
        next((m.root for m in models if m.parent is None), None),
        profile.reported_version,
    )
    return with_role(with_thresholds(recognized, spec), spec)


async def _models(talk: Interview) -> tuple[list[Card], str | None]:
    """Return the models that the worker serves, from OpenAI's list with None, or from Triton's list
    with the engine's kind. Raises UnrecognizedError if it has neither list.
    """
    try:
        return await cards(talk), None
    except UnrecognizedError:
        if models := await triton.models(talk):
            return [Card(name) for name in models], triton.ADAPTER.kind
        raise


def _served(listed: Sequence[Card], most: int) -> Sequence[Card]:
    """Return at most `most` of a worker's models in the order in which it lists them, adapters
    last, so that an adapter loaded later displaces no other model.

    Raises UnrecognizedError if there are more than `most` models that are no adapters, because no
    engine has so many.
    """
    if sum(card.parent is None for card in listed) > most:
        raise UnrecognizedError(f"it lists more than {most} models (limits.models), not adapters")
    return sorted(listed, key=lambda card: card.parent is not None)[:most]


async def with_models(
    http: aiohttp.ClientSession,
    recognized: Recognized,
    spec: WorkerSpec,
    timeout_s: float,
    most_models: int = MAX_MODELS,
) -> Recognized:
    """Return the same engine with its present models: those of a Triton server, or LoRA adapters.

    Raises UnrecognizedError, WireError, aiohttp.ClientError or TimeoutError.
    """
    talk, facts = Interview(http, spec, timeout_s), recognized.facts
    if spec.model:
        return recognized
    if recognized.kind != triton.ADAPTER.kind:
        listed = await cards(talk)
        found = _served(listed, most_models)
        adapters = frozenset(m.id for m in found if m.parent is not None)
        facts = replace(facts, models=tuple(m.id for m in found), adapters=adapters)
        return replace(recognized, facts=facts, refused_models=len(listed) - len(found))
    names = await triton.models(talk)
    if not names:  # one that has none is not served, which its probes show
        return recognized
    refused, names = len(names[most_models:]), names[:most_models]
    facts = replace(facts, models=tuple(names))
    roles = await triton.roles(talk, names)
    return replace(recognized, facts=facts, roles=roles, refused_models=refused)


def with_thresholds(recognized: Recognized, spec: WorkerSpec) -> Recognized:
    """Return `recognized` with the thresholds and the weight of `spec`."""
    facts = replace(
        recognized.facts,
        max_requests=_or_nan(spec.max_requests),
        max_queued_tokens=_or_nan(spec.max_queued_tokens),
        max_kv_fraction=_or_nan(spec.max_kv_fraction),
        weight=spec.weight,
    )
    return replace(recognized, facts=facts)


def with_role(recognized: Recognized, spec: WorkerSpec) -> Recognized:
    """Return `recognized` with the role of `spec`, and the group of workers from which it can then
    take KV.
    """
    role = recognized.own_role if spec.role == "both" else spec.role
    transfer = TRANSFERS.get(recognized.transfer)
    facts = replace(
        recognized.facts,
        role=role,
        serves_alone=role == "both" or transfer is None or transfer.serves_alone,
        concurrent=transfer is not None and transfer.concurrent,
        keeps_prefixes=role != "decode" or recognized.caches_decoded,
    )
    return with_revision(replace(recognized, facts=facts), spec)


def with_revision(recognized: Recognized, spec: WorkerSpec) -> Recognized:
    """Return `recognized` with the model revision that `spec` names, or else the engine.

    Only workers of one revision take KV from each other, so the revision is a part of the group's
    name. A default group has the engine's version in its name already.
    """
    told = recognized.reported_version
    revision = spec.revision or told.revision or told.version[:MAX_REVISION_CHARACTERS] or None
    own = None if recognized.facts.role == "both" else recognized.own_group
    group = spec.group or own
    if group and revision and (spec.group or revision != told.version):
        group = f"{group}@{revision}"
    return replace(recognized, facts=replace(recognized.facts, revision=revision, group=group))


def _own_group(kind: str, spec: WorkerSpec, profile: Profile) -> str | None:
    """Return the name of the group of engines from which a worker can take KV by default, those of
    its kind and version; None if it can take none.
    """
    if not (profile.transfers and profile.version):
        return None
    return " ".join(filter(None, (kind, profile.version, spec.transfer)))


def _block_size(spec: WorkerSpec, profile: Profile, has_events: bool) -> int:
    """Return the block size, in tokens, that the router uses for the worker. Raises
    UnrecognizedError if it is out of range.

    Without events, the router keeps only its own guesses of the worker's cache. Blocks of at least
    64 tokens make these as good and take a quarter of the time and memory.
    """
    size = _own_block_size(spec, profile)
    if size not in BLOCK_SIZES:
        raise UnrecognizedError(f"it says that its blocks have {size} tokens; allowed: 1..4096")
    if has_events or spec.block_size is not None:
        return size
    return size * -(-_GUESSED_BLOCK // size)


def _own_block_size(spec: WorkerSpec, profile: Profile) -> int:
    return spec.block_size or profile.block_size or profile.usual_block_size


async def _profile(talk: Interview, named: str | None) -> tuple[str, Profile]:
    """Return the engine's kind, from the operator or the engine, and the facts that the engine
    reports.
    """
    for kind in ADAPTERS if named is None else (named,):
        profile = await ADAPTERS[kind].recognize(talk, named is not None)
        if profile is not None:
            return kind, profile
    raise AssertionError("the last adapter takes anybody")


def _address(spec: WorkerSpec, profile: Profile) -> int | None:
    """Return the number by which a request to this URL addresses the rank, as in vLLM's
    `v1/engine/input_processor.py` (0.14 to 0.33); None if requests need no number. Raises
    NoSuchRankError if the engine does not have the rank.
    """
    if spec.rank is None:
        return None
    if not profile.ranks:
        return spec.rank
    if spec.rank not in profile.ranks:
        raise NoSuchRankError(spec.rank, profile.ranks)
    return profile.ranks.index(spec.rank)


def _capacity(spec: WorkerSpec, profile: Profile) -> float:
    """Return the capacity of the worker's KV cache in tokens; NaN if it is unknown. Raises
    UnrecognizedError if the number is impossibly large.
    """
    told = profile.kv_tokens
    for tokens in told.values():
        if tokens > MAX_KV_TOKENS:
            raise UnrecognizedError(f"it reports room for {tokens} tokens of KV")
    if spec.rank is not None:
        return _or_nan(spec.kv_tokens or told.get(spec.rank))
    if spec.kv_tokens is not None:
        return spec.kv_tokens * max(len(profile.ranks), 1)
    known = set(profile.ranks or (0,)) <= told.keys()
    return float(sum(told.values())) if known else math.nan


def _source(spec: WorkerSpec, profile: Profile) -> EventSource | None:
    """Return the worker's event endpoints, from its options or else from its own report."""
    if spec.events == "none":
        return None
    if spec.events == POLL:
        return PollSource(f"{spec.url}{EVENTS_PATH}")
    if spec.events is not None:
        bind = spec.events.startswith(BIND)
        live = spec.events.removeprefix(BIND)
        return ZmqSource(live, spec.replay, profile.snapshot, spec.topic or "", bind)
    alone = profile.ranks[0] if len(profile.ranks) == 1 else None
    rank = alone if spec.rank is None else spec.rank
    source = None if rank is None else profile.sources.get(rank)
    if isinstance(source, ZmqSource):
        source = replace(source, snapshot=profile.snapshot)
        if spec.replay is not None:
            source = replace(source, replay=spec.replay)
        if spec.topic is not None:
            source = replace(source, topic=spec.topic)
    return source


async def _refused(talk: Interview, source: EventSource | None, allowed: EventHosts) -> str:
    """Return why KV events are not read from the endpoints that the worker itself names; "" if they
    are read.

    Endpoints in the operator's options are always allowed.
    """
    if talk.spec.events is not None or not isinstance(source, ZmqSource):
        return ""
    named = {source.live} if talk.spec.replay else {source.live, source.replay or source.live}
    own = {talk.host.lower()}
    strange = [endpoint for endpoint in named if not allowed.allow(endpoint, own)]
    if strange:
        own |= await _addresses(talk.host)
        strange = sorted(endpoint for endpoint in named if not allowed.allow(endpoint, own))
    if not strange:
        return ""
    return (
        f"it names {strange[0][:200]!r} for its KV events, which is not its own host: not read; "
        "give the worker events=..., or allow the host by event_hosts"
    )


async def _addresses(host: str) -> set[str]:
    """Return the IP addresses of a host name now; an empty set if it has none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(address[0]) for *_, address in found}


def _advice(spec: WorkerSpec, profile: Profile) -> str:
    """Return advice for the operator, such as that events in blocks of another size are useless."""
    given, told = spec.block_size, profile.block_size
    if given is None or told in (None, given):
        return profile.advice
    return f"block_size={given} was given, but it reports {told}: its KV events may be useless"


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)

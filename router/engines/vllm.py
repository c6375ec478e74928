"""The adapter of vLLM 0.9 to 0.33, and of our own engine, which has the same API. vLLM has
Prometheus metrics at `/metrics`, whose label `engine` is the rank, and `/kv_event_sources` (0.31).
Our engine adds a snapshot of its cache at `/kv_snapshot`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.wire.events import WireError
from engine.wire.metrics import EngineLoad, parse_loads
from policies.facts import Role
from router.body.legs import NIXL, BootstrapAddress, Warmroute
from router.body.paths import GRPC_PATHS, KSERVE_PATHS, OPTIONAL_PATHS
from router.engines.adapter import (
    Adapter,
    ExactnessFlags,
    Interview,
    KvTransfers,
    LoadReader,
    Profile,
    RankLoad,
    StreamForm,
    UnrecognizedError,
    cards,
    decoded,
    is_paused,
    share,
)
from router.engines.rendering import VllmRender
from router.engines.version import version_of
from router.events.sources import RankedSources, kv_event_sources

_IS_PAUSED = "/is_paused"
_BOOTSTRAP_PORT = 8_998  # VLLM_MOONCAKE_BOOTSTRAP_PORT
_SHOWN_MODELS, _SHOWN_CHARACTERS = 5, 500
_RENDERS, _COMPLETES = "/v1/chat/completions/render", ("/v1/chat/completions", "/v1/completions")
RENDERER = (
    "it is a renderer, not a worker: vllm launch render makes token ids of requests and answers "
    "none; name a vllm serve instead"
)
_FLAGS = ExactnessFlags(
    caching="the engine without --no-enable-prefix-caching",
    events='--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\'',
    replay='"replay_endpoint":"tcp://*:5657" in the engine\'s --kv-events-config (before 0.31 also '
    "replay= of the worker)",
    buffer='a larger "buffer_steps" in the engine\'s --kv-events-config',
)
_NO_EVENTS = (
    "it names no KV events, so its cache is guessed: start it with --kv-events-config, or, before "
    "0.31, give the worker events=..."
)


class _Engine(msgspec.Struct):
    engine_id: Annotated[str, Meta(min_length=1, max_length=256)]


class _ServerInfo(msgspec.Struct):
    group: str | None = None  # None: it gives its KV to no other worker
    role: Role = "both"


def loads_in(text: str) -> Mapping[int, RankLoad]:
    """Return the load of each rank in the gauges whose names begin with `vllm:`. Raises WireError
    if there is none.
    """
    return {rank: _load_of(load) for rank, load in parse_loads(text).items()}


def _load_of(load: EngineLoad) -> RankLoad:
    usage = share(load.kv_usage, "KV usage")
    capacity = load.kv_capacity_tokens
    return RankLoad(
        running=load.running,
        waiting=load.waiting,
        kv_used_tokens=float("nan") if capacity is None else usage * capacity,
        kv_usage=usage,
        grown=load.prefix_query_tokens or 0,
        asleep=load.asleep,
        paused=load.paused,
        emptied=load.emptied,
        transfers=KvTransfers(load.kv_expired, load.kv_late, load.kv_failed),
        adapters=load.adapters,
    )


async def is_renderer(status_of: Callable[[str], Awaitable[int]]) -> bool:
    """Return whether a server renders requests but completes none, as `vllm launch render` does.
    `status_of` returns the status of a GET to a path. The paths that are tried accept only POST:
    405 means that a path exists, 404 that it does not.
    """
    if await status_of(_RENDERS) != 405:
        return False
    return all([await status_of(path) == 404 for path in _COMPLETES])


async def _refuse_renderer(talk: Interview, named: bool) -> None:
    """Raise UnrecognizedError if the server is only a renderer. Raises WireError,
    aiohttp.ClientError or TimeoutError if the server cannot be asked.
    """

    async def status_of(path: str) -> int:
        return (await talk.get(path)).status

    may_be = named or (await cards(talk))[0].owned_by == "vllm"
    if may_be and await is_renderer(status_of):
        raise UnrecognizedError(RENDERER)


async def profile_of(talk: Interview, named: bool) -> Profile | None:
    """Return the profile that vLLM, or an engine with vLLM's API, reports; see
    `Adapter.recognize`.
    """
    loads: dict[int, EngineLoad] = {}
    try:
        loads = parse_loads(await talk.metrics())
    except WireError:
        await _refuse_renderer(talk, named)
        if not named:
            return None
    await _check_model(talk)
    if loads and all(load.asleep or load.paused for load in loads.values()):
        raise UnrecognizedError("its engine sleeps; POST /wake_up wakes it")
    pause_url = await _pause_url(talk)
    ranked, told = await _sources(talk), await version_of(talk)
    known = [load for load in loads.values() if load.block_size is not None]
    capacity = {rank: load.kv_capacity_tokens for rank, load in loads.items()}
    return Profile(
        block_size=known[0].block_size if known else None,
        kv_tokens={rank: tokens for rank, tokens in capacity.items() if tokens is not None},
        ranks=tuple(sorted(loads)) or tuple(range(ranked.ranks)),
        sources=ranked.by_rank,
        loads=LoadReader(talk.metrics_url, loads_in) if loads else None,
        advice=_NO_EVENTS if talk.spec.events is None and not ranked.by_rank else "",
        pause_url=pause_url,
        keeps_copies=True,
        version=told.version,
        reported_version=told,
        transfers=True,
        bootstrap=await _bootstrap(talk),
        caches_prefixes=all(load.caches_prefixes for load in loads.values()),
    )


async def _check_model(talk: Interview) -> None:
    """Raise UnrecognizedError if the server does not list the configured model, because it would
    answer requests for that model with 404.
    """
    given, served = talk.spec.model, [card.id for card in await cards(talk)]
    if given is not None and given not in served:
        listed = ", ".join(map(repr, served[:_SHOWN_MODELS]))
        raise UnrecognizedError(f"it serves no model {given!r}, but {listed}"[:_SHOWN_CHARACTERS])


async def _pause_url(talk: Interview) -> str | None:
    """Return the URL at which the server says whether it is paused, or None if there is none. vLLM
    has such a URL if it runs with VLLM_SERVER_DEV_MODE. An engine in a long step answers late.
    Raises UnrecognizedError if the server is paused.
    """
    try:
        status, body = await talk.get(_IS_PAUSED)
    except TimeoutError:
        status, body = 200, b""
    if status != 200:
        return None
    if is_paused(body):
        raise UnrecognizedError("its engine is paused; POST /resume resumes it")
    return f"{talk.spec.url}{_IS_PAUSED}"


async def _bootstrap(talk: Interview) -> BootstrapAddress | None:
    """Return the bootstrap address of a worker that prefills with MooncakeConnector. The bootstrap
    server knows the names of its engines; each start of an engine draws a new name, so the router
    asks for the names at each recognition. Raises UnrecognizedError, aiohttp.ClientError or
    TimeoutError if the names cannot be read.
    """
    spec = talk.spec
    gives = spec.role == "prefill" or (spec.role == "both" and spec.group is not None)
    if spec.transfer != "mooncake" or not gives:
        return None
    port = spec.bootstrap_port or _BOOTSTRAP_PORT
    where = f"http://{_in_url(talk.host)}:{port}/query"
    try:
        status, body = await talk.get_url(where)
        known = decoded(body, dict[str, _Engine], where) if status == 200 else {}
        names = [known[str(rank)].engine_id for rank in range(len(known))]
    except (WireError, KeyError) as error:
        raise UnrecognizedError(f"GET {where} names no engine of each rank: {error}") from error
    if not names:
        raise UnrecognizedError(f"GET {where} answered {status} and names no engine")
    if spec.rank is not None and spec.rank >= len(names):
        raise UnrecognizedError(f"GET {where} names no engine of rank {spec.rank}")
    return BootstrapAddress(talk.host, port, len(names), spec.rank, engine_ids=tuple(names))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _sources(talk: Interview) -> RankedSources:
    if talk.spec.events is not None:
        return RankedSources({})
    status, body = await talk.get("/kv_event_sources")
    return kv_event_sources(body, talk.host) if status == 200 else RankedSources({})


ADAPTER = Adapter(
    "vllm",
    profile_of,
    lacks=KSERVE_PATHS | {"/generate"},  # by the HTTP server of vLLM 0.33
    takes_prompt_ids=True,
    # `openai/chat_completion/serving.py` names the fields in each choice, null where not asked.
    stream_form=StreamForm(hidden=b"null"),
    transfer=NIXL,
    flags=_FLAGS,
    render=VllmRender(),
)


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    if not named and (await cards(talk))[0].owned_by != "warmroute":
        return None
    profile = await profile_of(talk, named=True)
    if profile is None:
        return None
    group, role = await _server_info(talk)  # a group in any role, for that may be changed
    return replace(
        profile,
        snapshot=f"{talk.spec.url}/kv_snapshot",
        keeps_copies=False,
        advice="",
        role=role,
        transfers=bool(group),
        version=f"{profile.version} {group}",
    )


async def _server_info(talk: Interview) -> tuple[str, Role]:
    """Return the role of a worker with our engine, and its KV group. All workers of a KV group
    store the KV of the same model in the same form.
    """
    status, body = await talk.get("/server_info")
    if status != 200:
        return "", "both"
    try:
        info = msgspec.json.decode(body, type=_ServerInfo)
    except msgspec.DecodeError:
        return "", "both"
    return (info.group or "")[:_SHOWN_CHARACTERS], info.role


WARMROUTE = Adapter(
    "warmroute",
    _recognize,
    lacks=GRPC_PATHS | (OPTIONAL_PATHS - {"/tokenize", "/detokenize"}),
    takes_prompt_ids=True,
    stream_form=StreamForm(chat_tokens=256),
    transfer=Warmroute(),
    speaks_kserve=True,
    render=VllmRender("warmroute-engine --render"),
)

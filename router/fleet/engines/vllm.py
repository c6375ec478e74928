"""vLLM 0.9 to 0.33, and our own engine, which has vLLM's surface.

Prometheus at `/metrics`, label `engine` the rank; `/kv_event_sources` (0.31); our engine adds a
snapshot of its cache at `/kv_snapshot`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.wire.events import WireError
from engine.wire.metrics import EngineLoad, parse_loads
from router.events.sources import RankedSources, kv_event_sources
from router.fleet.engines.adapter import (
    Adapter,
    Interview,
    LoadReader,
    Profile,
    RankLoad,
    UnrecognizedError,
    cards,
    share,
)


def loads_in(text: str) -> Mapping[int, RankLoad]:
    """The load of each rank in `vllm:...` gauges. Raises WireError."""
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
    )


async def profile_of(talk: Interview, named: bool) -> Profile | None:
    """What a vLLM, or an engine with its surface, says of itself. See `Adapter`."""
    loads: dict[int, EngineLoad] = {}
    try:
        loads = parse_loads(await talk.metrics())
    except WireError:
        if not named:
            return None
    if loads and all(load.asleep for load in loads.values()):
        raise UnrecognizedError("its engine sleeps; POST /wake_up wakes it")
    ranked = await _sources(talk)
    known = [load for load in loads.values() if load.block_size is not None]
    capacity = {rank: load.kv_capacity_tokens for rank, load in loads.items()}
    return Profile(
        block_size=known[0].block_size if known else None,
        kv_tokens={rank: tokens for rank, tokens in capacity.items() if tokens is not None},
        ranks=tuple(sorted(loads)) or tuple(range(ranked.ranks)),
        sources=ranked.by_rank,
        loads=LoadReader(talk.metrics_url, loads_in) if loads else None,
    )


async def _sources(talk: Interview) -> RankedSources:
    if talk.spec.events is not None:
        return RankedSources({})
    status, body = await talk.get("/kv_event_sources")
    return kv_event_sources(body, talk.host) if status == 200 else RankedSources({})


ADAPTER = Adapter("vllm", profile_of)


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    if not named and (await cards(talk))[0].owned_by != "warmroute":
        return None
    profile = await profile_of(talk, named=True)
    return profile and replace(profile, snapshot=f"{talk.spec.url}/kv_snapshot")


WARMROUTE = Adapter("warmroute", _recognize)

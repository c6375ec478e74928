"""Where an engine says its KV events are, read from its own answers. No requests are made here.

vLLM 0.31 and later and our engine answer `GET /kv_event_sources`; SGLang 0.5.23 and later say it
under `kv_events` in `GET /server_info`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.wire import WireError
from router.events.source import MAX_RANK, ZmqSource, at_rank, reachable, usable

log = logging.getLogger(__name__)

_Text = Annotated[str, Meta(max_length=1024)]
_Port = Annotated[int, Meta(ge=1, le=65_535)]


@dataclass(frozen=True, slots=True)
class RankedSources:
    """Sources by data-parallel rank; none where the engine publishes nothing we can reach."""

    by_rank: dict[int, ZmqSource]
    ranks: int = 1  # how many the engine has, with events or without
    block_size: int | None = None  # tokens a block of its events, where it says so


class _Config(msgspec.Struct):
    """A publisher's settings as vLLM shows them, resolved."""

    endpoint: _Text
    replay_endpoint: _Text | None = None
    topic: _Text = ""
    publisher: _Text | None = None
    enable_kv_cache_events: bool = True


class _Announced(msgspec.Struct):
    """SGLang's account of its publishers."""

    endpoint_host: _Text
    endpoint_port_base: _Port
    publisher: _Text | None = None
    topic: _Text | None = None
    block_size: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    dp_size: Annotated[int, Meta(ge=1, le=MAX_RANK + 1)] = 1
    replay_endpoint_port_base: _Port | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _Announced | None = None


def kv_event_sources(body: bytes, host: str) -> RankedSources:
    """What `GET /kv_event_sources` of the worker at `host` answered.

    A map from rank to settings; empty, or `publisher` "null", where nothing is published. An
    endpoint that cannot be reached from here is left out with a warning: such a worker can serve
    all the same. Raises WireError for anything else.
    """
    try:
        settings = msgspec.json.decode(body, type=dict[str, _Config | None])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"/kv_event_sources: {error}") from error
    if len(settings) > MAX_RANK + 1:
        raise WireError(f"/kv_event_sources: {len(settings)} ranks; at most {MAX_RANK + 1}")
    by_rank = {}
    for key, config in settings.items():
        rank = _rank(key)
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            continue
        replay = config.replay_endpoint
        source = ZmqSource(
            live=reachable(config.endpoint, host),
            replay=reachable(replay, host) if replay else None,
            topic=config.topic,
        )
        if _reached(source, f"rank {rank} of {host}"):
            by_rank[rank] = source
    ranks = max((_rank(key) + 1 for key in settings), default=1)
    return RankedSources(by_rank, ranks)


def server_info_sources(body: bytes, host: str) -> RankedSources:
    """What `GET /server_info` of the SGLang worker at `host` says under `kv_events`.

    Null, absent (before 0.5.23) or `publisher` "null" mean that nothing is published. Ports are
    those of rank 0. Raises WireError for what is malformed.
    """
    try:
        announced = msgspec.json.decode(body, type=_ServerInfo).kv_events
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"/server_info: {error}") from error
    if announced is None:
        return RankedSources({})
    if announced.publisher == "null":
        return RankedSources({}, announced.dp_size, announced.block_size)
    named, replay_port = announced.endpoint_host.strip("[]"), announced.replay_endpoint_port_base
    shown = f"[{named}]" if ":" in named else named or "*"
    first = ZmqSource(
        live=reachable(f"tcp://{shown}:{announced.endpoint_port_base}", host),
        replay=reachable(f"tcp://{shown}:{replay_port}", host) if replay_port else None,
        topic=announced.topic or "",
    )
    by_rank = {}
    if _reached(first, host):
        try:
            for rank in range(announced.dp_size):
                source = at_rank(first, rank)
                assert isinstance(source, ZmqSource)
                by_rank[rank] = source
        except ValueError as error:
            raise WireError(f"/server_info: kv_events: {error}") from error
    return RankedSources(by_rank, announced.dp_size, announced.block_size)


def _rank(key: str) -> int:
    if key.isascii() and key.isdigit() and len(key) <= 4 and int(key) <= MAX_RANK:
        return int(key)
    raise WireError(f"/kv_event_sources: rank {key[:40]!r}; allowed: 0..{MAX_RANK}")


def _reached(source: ZmqSource, whose: str) -> bool:
    for endpoint in (source.live, source.replay):
        if endpoint is not None and not usable(endpoint):
            log.warning("%s: unusable event endpoint %.200r; no events", whose, endpoint)
            return False
    return True

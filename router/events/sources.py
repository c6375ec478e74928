"""Describes the sources of a worker's KV events as data, and parses the announcements of sources
that engines make.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.wire.events import WireError

MAX_RANK = 4_095
_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
_CONNECTED = re.compile(
    r"tcp://[^\s/:*]+:(\d{1,5})|tcp://\[[0-9a-fA-F:.%]+\]:(\d{1,5})|ipc://\S{1,100}"
)
_BOUND = re.compile(
    r"tcp://(?:\*|[^\s/:*]+):(\d{1,5})|tcp://\[[0-9a-fA-F:.%]+\]:(\d{1,5})|ipc://\S{1,100}"
)


@dataclass(frozen=True, slots=True)
class ZmqSource:
    """A publisher of event batches by ZMQ; its URLs have the form that ZMQ and HTTP take. `topic`
    is the prefix (UTF-8, may be empty) to which the router subscribes if the router connects to the
    publisher. `bind` says that the router binds `live` and engines connect to it; then the whole
    topic tells the workers at the endpoint apart.
    """

    live: str
    replay: str | None = None  # a ROUTER socket that replays missed batches
    snapshot: str | None = None  # our engine's own: its whole cache by HTTP
    topic: str = ""
    bind: bool = False

    @property
    def exclusive(self) -> bool:
        """True if only one router can read the events: the router to which engines connect."""
        return self.bind

    @property
    def address(self) -> str:
        """The endpoint of live events, as a text for people."""
        return f"bind:{self.live}" if self.bind else self.live


@dataclass(frozen=True, slots=True)
class PollSource:
    """Events that the router polls by HTTP (TensorRT-LLM `POST /kv_cache_events`). Reading removes
    the events from the engine, so nobody else may poll this URL. `rank` is the data-parallel rank
    whose events count; events without a rank belong to rank 0.
    """

    url: str
    rank: int = 0

    @property
    def exclusive(self) -> bool:
        """Always True, because the events that one router reads are gone for all other routers."""
        return True

    @property
    def address(self) -> str:
        """The URL that the router polls, as a text for people."""
        return self.url


EventSource = ZmqSource | PollSource


def at_rank(source: EventSource, rank: int) -> EventSource:
    """Return the source of data-parallel rank `rank` of an engine whose rank 0 has `source`.

    The rule is that of vLLM, SGLang and TensorRT-LLM: `tcp` ports are counted up from rank 0's, in
    the live and the replay endpoint; `inproc` and `ipc` names end in `_dp<rank>` (vLLM
    `offset_endpoint_port`, 0.9 to 0.33). Raises ValueError if there is no such endpoint.
    """
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"data-parallel rank {rank}; allowed: 0..{MAX_RANK}")
    if isinstance(source, PollSource):
        return replace(source, rank=rank)
    replay = None if source.replay is None else endpoint_at_rank(source.replay, rank)
    return replace(source, live=endpoint_at_rank(source.live, rank), replay=replay)


def endpoint_at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of rank `rank`, made from the endpoint of rank 0. Raises ValueError if
    there is none.
    """
    if rank == 0:
        return endpoint
    scheme, _, address = endpoint.partition("://")
    if scheme in ("inproc", "ipc"):
        return f"{endpoint}_dp{rank}"
    host, colon, port = address.rpartition(":")
    if scheme != "tcp" or not colon or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{endpoint!r} has no endpoint of rank {rank}: it is no tcp://host:port")
    if int(port) + rank > 65_535:
        raise ValueError(f"{endpoint!r} has no endpoint of rank {rank}: no port {int(port) + rank}")
    return f"tcp://{host}:{int(port) + rank}"


def usable(endpoint: str, bind: bool = False) -> bool:
    """Return whether ZMQ can connect to the endpoint or, with `bind`, bind it. Such an endpoint is
    tcp with a host and a port, or ipc. Wildcard addresses (`tcp://*:5557`, `tcp://0.0.0.0:5557`)
    can be bound, but not connected to.
    """
    matched = (_BOUND if bind else _CONNECTED).fullmatch(endpoint)
    if matched is None:
        return False
    port = matched[1] or matched[2]
    return port is None or 0 < int(port) < 65_536


def reachable(endpoint: str, host: str) -> str:
    """Return the endpoint with the worker's `host` in place of a wildcard address."""
    scheme, _, address = endpoint.partition("://")
    bound, colon, port = address.rpartition(":")
    if scheme == "tcp" and colon and bound in _WILDCARDS:
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{port}"
    return endpoint


_ANY, _IPC = "*", "ipc"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class EventHosts:
    """The hosts that an engine may name for its events, besides its own host. The router connects
    to the endpoints that an engine names. Without this list, an impostor could make the router
    connect to any port within the router's reach.
    """

    names: frozenset[str] = frozenset()  # in lower case; "*": any, "ipc": sockets of this machine
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def allow(self, endpoint: str, own: Collection[str]) -> bool:
        """Return whether an engine may name this endpoint for its events. `own` has the engine's
        own names and addresses.
        """
        scheme, _, address = endpoint.partition("://")
        if scheme != "tcp":
            return scheme == "ipc" and _IPC in self.names
        host = address.rpartition(":")[0].strip("[]").lower()
        if host in own or host in self.names or _ANY in self.names:
            return True
        try:
            found = ip_address(host)
        except ValueError:
            return False
        return any(found in network for network in self.networks)


NO_OTHERS = EventHosts()


def event_hosts(items: Iterable[str]) -> EventHosts:
    """Return the hosts in the key `event_hosts`. Raises ValueError if an item is not a host."""
    names: set[str] = set()
    networks: list[IPv4Network | IPv6Network] = []
    for item in items:
        try:
            networks.append(ip_network(item))
        except ValueError as error:
            if item != _ANY and (not _NAME.fullmatch(item) or item.replace(".", "").isdigit()):
                raise ValueError(
                    f"{item[:80]!r} is no host; allowed: NAME, ADDRESS, CIDR, {_IPC}, {_ANY}"
                ) from error
            names.add(item.lower())
    return EventHosts(frozenset(names), tuple(networks))


log = logging.getLogger(__name__)

_Text = Annotated[str, Meta(max_length=1024)]
_Port = Annotated[int, Meta(ge=1, le=65_535)]


@dataclass(frozen=True, slots=True)
class RankedSources:
    """The sources of an engine's events by data-parallel rank. They are empty if the engine
    publishes no events that the router can reach.
    """

    by_rank: dict[int, ZmqSource]
    ranks: int = 1  # how many the engine has, with events or without
    block_size: int | None = None  # tokens a block of its events, where it says so


class _Config(msgspec.Struct):
    """The settings that a publisher uses, as vLLM returns them."""

    endpoint: _Text
    replay_endpoint: _Text | None = None
    topic: _Text = ""
    publisher: _Text | None = None
    enable_kv_cache_events: bool = True


class _SglangPublishers(msgspec.Struct):
    """The description of an engine's publishers that SGLang returns."""

    endpoint_host: _Text
    endpoint_port_base: _Port
    publisher: _Text | None = None
    topic: _Text | None = None
    block_size: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    dp_size: Annotated[int, Meta(ge=1, le=MAX_RANK + 1)] = 1
    replay_endpoint_port_base: _Port | None = None


class _SglangServerInfo(msgspec.Struct):
    kv_events: _SglangPublishers | None = None


def kv_event_sources(body: bytes, host: str) -> RankedSources:
    """Return the sources in the answer to `GET /kv_event_sources` of the worker at `host`. The
    answer is a map from rank to settings; if nothing is published, the map is empty, or `publisher`
    is "null". An endpoint that the router cannot reach is left out with a warning, because the
    worker can still serve requests. Raises WireError if the answer is malformed.
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
    """Return the sources under `kv_events` in the answer to `GET /server_info` of the SGLang worker
    at `host`. If `kv_events` is null or absent (before 0.5.23), or `publisher` is "null", nothing
    is published. The ports in the answer are those of rank 0. Raises WireError if the answer is
    malformed.
    """
    try:
        announced = msgspec.json.decode(body, type=_SglangServerInfo).kv_events
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


def _reached(source: ZmqSource, worker: str) -> bool:
    for endpoint in (source.live, source.replay):
        if endpoint is not None and not usable(endpoint):
            log.warning("%s: unusable event endpoint %.200r; no events", worker, endpoint)
            return False
    return True

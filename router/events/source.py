"""Where a worker's KV events are to be had, as data: endpoints, ranks, who binds.

vLLM, SGLang, TensorRT-LLM's push and our own engine publish by ZMQ; TensorRT-LLM's `trtllm-serve`
gives them to whoever asks by HTTP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
    """Batches published by ZMQ; URLs as ZMQ and HTTP take them.

    `topic`: where we connect, the prefix (UTF-8, may be empty) to subscribe to. `bind`: we bind
    `live` and engines connect to it; workers that share it are told apart by their whole topic.
    """

    live: str
    replay: str | None = None  # a ROUTER that sends again what was missed
    snapshot: str | None = None  # our engine's own: its whole cache by HTTP
    topic: str = ""
    bind: bool = False

    @property
    def exclusive(self) -> bool:
        """Whether one router alone can have its events: the one that engines connect to."""
        return self.bind

    @property
    def address(self) -> str:
        """For people."""
        return f"bind:{self.live}" if self.bind else self.live


@dataclass(frozen=True, slots=True)
class PollSource:
    """Events that are asked for by HTTP (TensorRT-LLM `POST /kv_cache_events`).

    Reading destroys: nobody else may ask at this URL. `rank`: the one whose events to take;
    events that name no rank are those of rank 0.
    """

    url: str
    rank: int = 0

    @property
    def exclusive(self) -> bool:
        """What one router reads is gone for all others."""
        return True

    @property
    def address(self) -> str:
        """For people."""
        return self.url


EventSource = ZmqSource | PollSource


def at_rank(source: EventSource, rank: int) -> EventSource:
    """The source of data-parallel rank `rank` of an engine whose rank 0 has `source`.

    By the rule of vLLM, SGLang and TensorRT-LLM: `tcp` ports are counted up from rank 0's, in
    the live and the replay endpoint; `inproc` and `ipc` names get `_dp<rank>` at their end
    (vLLM `offset_endpoint_port`, 0.9 to 0.33). Raises ValueError where there is no such endpoint.
    """
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"data-parallel rank {rank}; allowed: 0..{MAX_RANK}")
    if isinstance(source, PollSource):
        return replace(source, rank=rank)
    replay = None if source.replay is None else endpoint_at_rank(source.replay, rank)
    return replace(source, live=endpoint_at_rank(source.live, rank), replay=replay)


def endpoint_at_rank(endpoint: str, rank: int) -> str:
    """One endpoint of `at_rank`. Raises ValueError."""
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
    """Whether ZMQ can connect to it, or bind it: tcp with a host and a port, or ipc.

    Every address can be bound (`tcp://*:5557`, `tcp://0.0.0.0:5557`), but not connected to.
    """
    matched = (_BOUND if bind else _CONNECTED).fullmatch(endpoint)
    if matched is None:
        return False
    port = matched[1] or matched[2]
    return port is None or 0 < int(port) < 65_536


def reachable(endpoint: str, host: str) -> str:
    """An endpoint that was bound to every address, as seen from here: at the worker's `host`."""
    scheme, _, address = endpoint.partition("://")
    bound, colon, port = address.rpartition(":")
    if scheme == "tcp" and colon and bound in _WILDCARDS:
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{port}"
    return endpoint

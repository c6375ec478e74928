"""What every adapter gives: who an engine is, and a way to read its load."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from router.events.source import EventSource
from router.fleet_io.engines.interview import Interview


class UnrecognizedError(Exception):
    """The worker did not answer as an OpenAI-compatible engine; the text says what it did."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one data-parallel rank, as its engine tells it."""

    running: int  # requests in the batch
    waiting: int  # requests not admitted yet
    kv_used_tokens: float = math.nan  # NaN: it does not say
    kv_usage: float = math.nan  # 0..1 of its KV cache, where it says no tokens
    grown: int = 0  # of what only grows while the engine lives: less means that it began anew
    asleep: bool = False  # it answers probes and no requests
    block_size: int = 0  # tokens of a KV block, where the figures say it; 0: they do not yet


def total(loads: Collection[RankLoad]) -> RankLoad:
    """Several ranks taken as one worker; at least one. Shares of the cache are averaged."""
    if len(loads) == 1:
        return next(iter(loads))
    return RankLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_used_tokens=math.fsum(load.kv_used_tokens for load in loads),
        kv_usage=math.fsum(load.kv_usage for load in loads) / len(loads),
        grown=sum(load.grown for load in loads),
        asleep=all(load.asleep for load in loads),
        block_size=max(load.block_size for load in loads),
    )


class LoadReader(Protocol):
    """Where an engine's load is read. Readers that are equal give the same answer."""

    def __hash__(self) -> int: ...

    async def read(
        self, http: aiohttp.ClientSession, timeout: aiohttp.ClientTimeout
    ) -> Mapping[int, RankLoad]:
        """The load of each rank; one that is missing has nothing new to say.

        Raises WireError, aiohttp.ClientError or TimeoutError.
        """
        ...


@dataclass(frozen=True, slots=True)
class Health:
    """How to ask whether an engine lives."""

    path: str = "/health"
    below: int = 500  # a status from here on means that it does not
    least_s: float = 0.0  # what an answer may take at the least


HEALTH = Health()  # of nearly everybody


@dataclass(frozen=True, slots=True)
class Profile:
    """What an engine says of itself. None or empty: it does not say."""

    block_size: int | None = None  # tokens
    usual_block_size: int = 16  # its default, taken where it does not say
    kv_tokens: Mapping[int, int] = field(default_factory=dict)  # whole KV cache, by rank
    ranks: tuple[int, ...] = (0,)  # those behind this URL
    sources: Mapping[int, EventSource] = field(default_factory=dict)  # of KV events, by rank
    snapshot: str | None = None  # URL of its whole cache
    loads: LoadReader | None = None
    health: Health = HEALTH
    advice: str = ""  # to its operator: what it could be started with for better


@dataclass(frozen=True, slots=True)
class Adapter:
    """One engine.

    `recognize` returns None where another engine answers; it asks for nothing that changes an
    engine before it is sure. With `named` the operator said that it is this one, and it takes
    defaults for what is not answered. Raises UnrecognizedError, WireError, aiohttp.ClientError or
    TimeoutError.
    """

    kind: str
    recognize: Callable[[Interview, bool], Awaitable[Profile | None]]

"""Generates prefixes with a heavy tail, nested in each other, which are replaced by new ones in
time.

No benchmark tool draws this, but every large service sees it: few prefixes carry most of the
traffic (group `r` of `n` is asked with probability proportional to `r^-exponent`: Zipf),
applications share a system prompt, their users share a document below it, and the popular prefix of
today is gone tomorrow.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from simulator.traces.generators.common import (
    Count,
    Made,
    Rate,
    Requests,
    Seconds,
    Shape,
    at_rate,
    block_for,
    check_prompt,
    span,
)
from simulator.traces.job import Job, TraceError
from simulator.traces.options import Size
from simulator.traces.timing import NS

MAX_LEVELS = 4
MAX_LEAVES = 10_000_000
OWN_FROM = 1 << 40  # parts of the requests' own; those of prefixes lie below


class ZipfKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests with nested prefixes, drawn level by level; popular prefixes change over time."""

    requests: Annotated[Requests, Meta(description="number of requests")] = 10_000
    rate: Annotated[Rate, Meta(description="requests per second; inf: all at once")] = 10.0
    burstiness: Annotated[
        Shape,
        Meta(description="gamma shape of the gaps between arrivals; 1: Poisson, inf: even"),
    ] = 1.0
    groups: Annotated[Count, Meta(description="number of prefixes of the first level")] = 100
    exponent: Annotated[
        float,
        Meta(
            ge=0,
            le=10,
            description="Zipf exponent of the prefixes' shares; 0: equal shares",
        ),
    ] = 1.0
    levels: Annotated[
        int, Meta(ge=1, le=MAX_LEVELS, description="number of levels of nested prefixes")
    ] = 1
    children: Annotated[
        Count,
        Meta(description="number of prefixes below each prefix; shares follow Zipf's law"),
    ] = 10
    system: Annotated[
        int, Meta(ge=1, le=1 << 20, description="tokens of a prefix at each level")
    ] = 2048
    question: Annotated[Size, Meta(description="prompt tokens that only one request has")] = Size(
        256
    )
    output: Annotated[Size, Meta(description="tokens of an answer")] = Size(256)
    lifetime_s: Annotated[
        Seconds,
        Meta(description="mean life of a first-level prefix and its sub-prefixes; 0: endless"),
    ] = 0.0


def zipf(keys: ZipfKeys, seed: int, block: int | None) -> Made:
    """Make `requests` prompts, each below a path of prefixes drawn level by level.

    A prefix that dies (lives are exponential and independent) is replaced by a new one at its rank.
    """
    levels = [Size(keys.system)] * keys.levels
    check_prompt(*levels, keys.question)
    leaves = keys.groups * keys.children ** (keys.levels - 1)
    if leaves > MAX_LEAVES:
        raise TraceError(f"{leaves} prefixes; expected {MAX_LEAVES} at most: take fewer children")
    random = Random(f"zipf {seed}")
    block = block or block_for(levels)
    origin = (
        f"{keys.groups} prefixes (Zipf {keys.exponent:g}) of {keys.levels} x {keys.system} tokens"
        f" + {keys.question} own, {keys.output} output tokens, {keys.rate:g} requests per second"
    )
    if keys.lifetime_s:
        origin += f", prefixes live {keys.lifetime_s:g} s"
    return Made(_jobs(keys, block, random), block, keys.requests, origin)


def weights(count: int, exponent: float) -> array[float]:
    """Return `[count]` running sums of `rank^-exponent`, ranks from 1, for draws by bisection."""
    return array("d", accumulate(rank**-exponent for rank in range(1, count + 1)))


def _jobs(keys: ZipfKeys, block: int, random: Random) -> Iterator[Job]:
    top = weights(keys.groups, keys.exponent)
    below = weights(keys.children, keys.exponent)
    lives = _PrefixesByRank(keys.groups, keys.lifetime_s, random)
    ends = [level * keys.system // block for level in range(keys.levels + 1)]
    tokens = keys.levels * keys.system
    times = at_rate(keys.rate, keys.requests, random, keys.burstiness)
    for serial, at_ns in enumerate(times):
        # A prefix is numbered by its path, level by level, so that no two have one number.
        path = lives.at(at_ns, bisect(top, random.random() * top[-1]))
        pieces = [span(path * MAX_LEVELS, ends[0], ends[1])]
        for level in range(1, keys.levels):
            path = path * keys.children + bisect(below, random.random() * below[-1])
            pieces.append(span(path * MAX_LEVELS + level, ends[level], ends[level + 1]))
        prompt = tokens + keys.question.draw(random)
        pieces.append(span(OWN_FROM + serial, ends[-1], -(-prompt // block)))
        yield Job(at_ns, prompt, max(1, keys.output.draw(random)), np.concatenate(pieces))


class _PrefixesByRank:
    """The prefixes that are at each rank at present. Lifetime: stream."""

    def __init__(self, ranks: int, lifetime_s: float, random: Random) -> None:
        self._now = array("q", range(ranks))
        self._next = ranks
        self._deaths_per_s = ranks / lifetime_s if lifetime_s else 0.0
        self._random = random
        self._death_ns = 0.0 if self._deaths_per_s else math.inf
        self._draw_death()

    def at(self, now_ns: int, rank: int) -> int:
        """Return the number of the prefix at `rank`, after replacing those that died until
        `now_ns`.
        """
        while self._death_ns <= now_ns:
            self._now[self._random.randrange(len(self._now))] = self._next
            self._next += 1
            self._draw_death()
        return self._now[rank]

    def _draw_death(self) -> None:
        if self._deaths_per_s:
            self._death_ns += self._random.expovariate(self._deaths_per_s) * NS

"""Routing rules that need no clock: which worker's cache a request goes to.

Each is a function of what a router could know without any model of time; together they frame what
routing alone does to hit rates. The definitions, constants included, are fixed: the published
tables of the traces were computed with them, and ours must come out to the digit.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from simulator.limits.lru import Holders, LruCache

HASH_FACTOR = 2_654_435_761  # Knuth's multiplicative hash: 2^32 over the golden ratio
PAIR_FACTOR = 1_000_003
WINDOW_S = 60.0
MAX_SHARE = 1.25  # of the mean work in the window, before `bounded` looks elsewhere


class Rule(Protocol):
    """Lifetime: one row of a table. The rule owns the caches it chooses between."""

    def place(self, serial: int, at_ns: int, ids: Sequence[int]) -> tuple[int, int]:
        """(worker, leading ids it holds) for the request; its ids are in the cache afterwards."""

    def charge(self, worker: int, at_ns: int, uncached_tokens: int) -> None:
        """Tell what the last placed request costs `worker`."""


class Blind:
    """A rule that looks at no cache: `round_robin`, `random`, `hash_1`, `hash_2`."""

    def __init__(self, name: str, workers: int, capacity: int | None) -> None:
        self._name = name
        self._workers = workers
        self._caches = [LruCache(capacity) for _ in range(workers)]
        self._random = random.Random(1)

    def place(self, serial: int, at_ns: int, ids: Sequence[int]) -> tuple[int, int]:
        """See `Rule`."""
        worker = self._choose(serial, ids)
        cache = self._caches[worker]
        match = cache.match(ids)
        cache.insert(ids)
        return worker, match

    def charge(self, worker: int, at_ns: int, uncached_tokens: int) -> None:
        """See `Rule`; it does not care."""

    def _choose(self, serial: int, ids: Sequence[int]) -> int:
        if self._name == "round_robin":
            return serial % self._workers
        if self._name == "random":
            return self._random.randrange(self._workers)
        key = ids[0] if ids else serial
        if self._name == "hash_2" and ids:
            key = key * PAIR_FACTOR + (ids[1] if len(ids) > 1 else 0)
        return (key * HASH_FACTOR >> 7) % self._workers


class Greedy:
    """The longest match; among equals the least uncached work so far, then the first worker."""

    def __init__(self, workers: int, capacity: int | None) -> None:
        self._holders = Holders(workers, capacity)
        self._work_tokens = [0] * workers

    def place(self, serial: int, at_ns: int, ids: Sequence[int]) -> tuple[int, int]:
        """See `Rule`."""
        match, bits = self._holders.longest(ids)
        work = self._work_tokens
        best = min((work[row], row) for row in range(len(work)) if bits >> row & 1)[1]
        worker = self._reconsider(best, at_ns)
        if worker != best:
            match = self._holders.match(worker, ids)
        self._holders.insert(worker, ids)
        return worker, match

    def charge(self, worker: int, at_ns: int, uncached_tokens: int) -> None:
        """See `Rule`."""
        self._work_tokens[worker] += uncached_tokens

    def _reconsider(self, best: int, at_ns: int) -> int:
        return best


class Bounded(Greedy):
    """Greedy, but the idlest worker where the best had over 1.25 x the mean work of a minute."""

    def __init__(self, workers: int, capacity: int | None) -> None:
        super().__init__(workers, capacity)
        self._recent: list[deque[tuple[float, int]]] = [deque() for _ in range(workers)]
        self._recent_tokens = [0] * workers

    def charge(self, worker: int, at_ns: int, uncached_tokens: int) -> None:
        """See `Rule`."""
        super().charge(worker, at_ns, uncached_tokens)
        self._recent[worker].append((_seconds(at_ns), uncached_tokens))
        self._recent_tokens[worker] += uncached_tokens

    def _reconsider(self, best: int, at_ns: int) -> int:
        sums = self._recent_tokens
        oldest_s = _seconds(at_ns) - WINDOW_S
        for worker, entries in enumerate(self._recent):
            while entries and entries[0][0] < oldest_s:
                sums[worker] -= entries.popleft()[1]
        mean_tokens = sum(sums) / len(sums)
        if sums[best] > MAX_SHARE * mean_tokens + 1:
            return sums.index(min(sums))
        return best


def _seconds(at_ns: int) -> float:
    """Milliseconds times a rounded thousandth, not a quotient: the published tables have it so.

    Traces tick in whole seconds, and whether work exactly a minute old still counts hangs on it.
    """
    return at_ns / 1_000_000 * 0.001


BLIND = ("round_robin", "random", "hash_1", "hash_2")
POOL_RULES = (*BLIND, "greedy", "bounded")


def make_rule(name: str, workers: int, capacity: int | None) -> Rule:
    """The rule called `name`, one of `POOL_RULES`, over empty caches of `capacity` blocks each."""
    if name == "greedy":
        return Greedy(workers, capacity)
    if name == "bounded":
        return Bounded(workers, capacity)
    return Blind(name, workers, capacity)

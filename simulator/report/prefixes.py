"""Which prefixes are hot, and how many workers hold a copy of each, in bounded memory.

Prefixes are counted at 1, 2, 4, 8, ... blocks by Space-Saving (Metwally, Agrawal and El Abbadi,
"Efficient Computation of Frequent and Top-k Elements in Data Streams", 2005): of a bounded number
of counters the smallest is given to whoever has none. How long a prefix truly is, between two of
those lengths, is what a few of its requests have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush, heapreplace, nlargest

import numpy as np

from policies.contract import Hashes
from router.core.actions import Decision
from simulator.replay.book import Book
from simulator.replay.result import I64, NEVER, HotPrefix
from simulator.replay.station import Station
from simulator.traces.job import Job

COUNTERS = 1024
FOLLOWED = 6  # whose copies are counted at every sample
CONSIDERED = 64
HOT_SHARE = 500  # hot is what at least one of so many requests begins with, two at least
SAME_SHARE = 0.9  # a longer prefix with this share of a shorter one's requests stands for it


class Counter:
    """One prefix. Lifetime: replay, or until another one takes its place."""

    __slots__ = ("copies", "count", "depth", "missed", "witnesses")

    def __init__(self, count: int, missed: int, depth: int, chain: Hashes) -> None:
        self.count = count  # at most so many requests began with it
        self.missed = missed  # at least this many fewer, at worst
        self.depth = depth  # blocks it was counted by
        self.witnesses = [chain]  # of its 1st, 2nd, 4th, ... request, up to twice its depth
        self.copies: dict[int, int] = {}  # time of a sample -> workers that held it

    @property
    def requests(self) -> int:
        """That began with it, for certain."""
        return self.count - self.missed

    def length(self) -> int:
        """Blocks that all its witnesses have in common."""
        first = self.witnesses[0]
        length = len(first)
        for chain in self.witnesses[1:]:
            length = min(length, len(chain))
            differ = np.flatnonzero(first[:length] != chain[:length])
            length = int(differ[0]) if len(differ) else length
        return length


class HotPrefixes:
    """Watches a replay. Lifetime: replay."""

    def __init__(self, counters: int = COUNTERS, followed: int = FOLLOWED) -> None:
        self._room = counters
        self._followed = followed
        self._requests = 0
        self._counters: dict[int, Counter] = {}  # by the chain hash of the prefix's last block
        # (count when last looked at, hash), each counter once: the smallest is found lazily.
        self._heap: list[tuple[int, int]] = []

    def on_start(self, book: Book) -> None:
        """Takes the table to read from."""
        self._book = book

    def on_dispatch(
        self, row: int, job: Job, chain: Hashes, decision: Decision, workers: Sequence[Station]
    ) -> None:
        """Counts the request's prefixes, the first time it is sent."""
        if self._book.attempts[row] > 1:
            return
        self.count(chain[: self._book.prompt_blocks[row]])

    def count(self, chain: Hashes) -> None:
        """One more request, with these full blocks of its prompt."""
        self._requests += 1
        counters, blocks, depth = self._counters, len(chain), 1
        while depth <= blocks:
            key = chain.item(depth - 1)
            counter = counters.get(key)
            if counter is None:
                full = len(counters) >= self._room
                self._enter(key, depth, chain[: 2 * depth].copy())
                if full:  # one newcomer a request: none is hotter than what it begins with
                    break
            else:
                counter.count += 1
                if not counter.count & (counter.count - 1):
                    counter.witnesses.append(chain[: 2 * depth].copy())
            depth *= 2

    def on_sample(self, now_ns: int, workers: Sequence[Station]) -> None:
        """Counts the copies of those that are hottest by now."""
        for counter in self._hottest(self._followed):
            prefix = counter.witnesses[0][: counter.depth]
            counter.copies[now_ns] = sum(
                station.engine.hit_blocks(prefix) == counter.depth for station in workers
            )

    def on_end(self, row: int) -> None:
        """A prefix does not care how a request ends."""

    def found(self, sampled_ns: I64, most: int = 5) -> tuple[HotPrefix, ...]:
        """The hottest prefixes, those first that caching saves most blocks for.

        `sampled_ns`: times of the result's samples; copies are `NEVER` where one was not followed.
        """
        return tuple(
            HotPrefix(
                counter.length(),
                counter.requests,
                np.array([counter.copies.get(t, NEVER) for t in sampled_ns.tolist()], np.int32),
            )
            for counter in self._hottest(most)
        )

    def _hottest(self, most: int) -> list[Counter]:
        """Of prefixes that contain each other and have about the same requests, the longest."""
        least = max(2, self._requests // HOT_SHARE)
        known = self._counters.items()
        shared = ((c.requests * c.depth, key) for key, c in known if c.requests >= least)
        ranked = {key: self._counters[key] for _, key in nlargest(CONSIDERED, shared)}
        covered = set()
        for counter in ranked.values():
            depth = 1
            while depth < counter.depth:
                key = counter.witnesses[0].item(depth - 1)
                shorter = ranked.get(key)
                if shorter and counter.requests >= SAME_SHARE * shorter.requests:
                    covered.add(key)
                depth *= 2
        return [counter for key, counter in ranked.items() if key not in covered][:most]

    def _enter(self, key: int, depth: int, chain: Hashes) -> None:
        """A counter for a prefix that has none: a new one, or the smallest there is."""
        heap, counters = self._heap, self._counters
        if len(counters) < self._room:
            heappush(heap, (1, key))
            counters[key] = Counter(1, 0, depth, chain)
            return
        while True:
            count, smallest = heap[0]
            grown = counters[smallest].count
            if grown == count:
                break
            heapreplace(heap, (grown, smallest))
        del counters[smallest]
        heapreplace(heap, (count + 1, key))
        counters[key] = Counter(count + 1, count, depth, chain)

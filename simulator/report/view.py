"""The data of one replay that a page draws; its size is bounded, however long the replay was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace, nlargest

import numpy as np
import numpy.typing as npt

from policies.contract import Hashes
from router.core.contract.actions import Decision
from simulator.replay.result import I64, NEVER, Book, HotPrefix, ReplayResult, Samples, Verdict
from simulator.replay.station import Station
from simulator.report.row import NS_PER_MS, ReplayRow, summarize, tpots_ns
from simulator.traces.job import Job

COUNTERS = 1024
FOLLOWED = 6  # prefixes whose copies are counted at every sample
CONSIDERED = 64
HOT_SHARE = 500  # a prefix is hot if at least 1 in 500 requests (and 2) begin with it
SAME_SHARE = 0.9  # a longer prefix with this share of a shorter one's requests replaces it


class Counter:
    """Counts the requests that begin with one prefix.

    Lifetime: replay, or until another prefix takes its place.
    """

    __slots__ = ("copies", "count", "depth", "missed", "witnesses")

    def __init__(self, count: int, missed: int, depth: int, chain: Hashes) -> None:
        self.count = count  # at most so many requests began with it
        self.missed = missed  # at least this many fewer, at worst
        self.depth = depth  # blocks of the counted prefix
        self.witnesses = [chain]  # of its 1st, 2nd, 4th, ... request, up to twice its depth
        self.copies: dict[int, int] = {}  # time of a sample -> workers that held it

    @property
    def requests(self) -> int:
        """The number of requests that certainly began with the prefix, which is a lower bound."""
        return self.count - self.missed

    def length(self) -> int:
        """Return how many blocks all kept examples of the prefix have in common."""
        first = self.witnesses[0]
        length = len(first)
        for chain in self.witnesses[1:]:
            length = min(length, len(chain))
            differ = np.flatnonzero(first[:length] != chain[:length])
            length = int(differ[0]) if len(differ) else length
        return length


class HotPrefixes:
    """Watches a replay and finds the prefixes that most requests begin with. Lifetime: replay."""

    def __init__(self, counters: int = COUNTERS, followed: int = FOLLOWED) -> None:
        self._room = counters
        self._followed = followed
        self._requests = 0
        self._counters: dict[int, Counter] = {}  # by the chain hash of the prefix's last block
        # (count when last looked at, hash), each counter once: the smallest is found lazily.
        self._heap: list[tuple[int, int]] = []

    def on_start(self, book: Book) -> None:
        """Keep the replay's table of requests, from which counts are read."""
        self._book = book

    def on_dispatch(
        self, row: int, job: Job, chain: Hashes, decision: Decision, workers: Sequence[Station]
    ) -> None:
        """Count the request's prefixes the first time it is dispatched."""
        if self._book.attempts[row] > 1:
            return
        self.count(chain[: self._book.prompt_blocks[row]])

    def count(self, chain: Hashes) -> None:
        """Count a request whose prompt has these full blocks."""
        self._requests += 1
        counters, blocks, depth = self._counters, len(chain), 1
        while depth <= blocks:
            key = chain.item(depth - 1)
            counter = counters.get(key)
            if counter is None:
                full = len(counters) >= self._room
                self._enter(key, depth, chain[: 2 * depth].copy())
                if full:  # one new counter per request: longer prefixes cannot be hotter
                    break
            else:
                counter.count += 1
                if not counter.count & (counter.count - 1):
                    counter.witnesses.append(chain[: 2 * depth].copy())
            depth *= 2

    def on_sample(self, now_ns: int, workers: Sequence[Station]) -> None:
        """Count on how many workers each of the currently hottest prefixes is cached."""
        for counter in self._hottest(self._followed):
            prefix = counter.witnesses[0][: counter.depth]
            counter.copies[now_ns] = sum(
                station.engine.hit_blocks(prefix) == counter.depth for station in workers
            )

    def on_end(self, row: int) -> None:
        """Do nothing: counts of prefixes do not depend on how a request ends."""

    def found(self, sampled_ns: I64, most: int = 5) -> tuple[HotPrefix, ...]:
        """Return the hottest prefixes, ordered by how many blocks caching saves for them.

        `sampled_ns` are the times of the result's samples; copies are `NEVER` at samples where the
        prefix was not followed.
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
        """Return at most `most` hot prefixes.

        Of prefixes that contain each other and have about the same requests, only the longest is
        kept.
        """
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
        """Add a counter for a new prefix; if all counters are taken, it replaces the
        smallest one.
        """
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


CURVE_POINTS = 201

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """The mean time that completed requests spent in the router, in prefill and in decode, ms."""

    router_ms: float  # from the arrival to the dispatch that was answered
    prefill_ms: float  # then to the first token: network, queue, prefill
    decode_ms: float  # then to the last token


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """The prompt tokens of admitted requests on all workers: cached, computed, and
    computed again.
    """

    cached: int
    computed: int
    recomputed: int  # computed again after a preemption


@dataclass(frozen=True, slots=True)
class RunView:
    """The curves, samples and hot prefixes that a page draws of one replay. Lifetime: process."""

    row: ReplayRow
    ttft_ms: Floats  # quantiles at evenly spaced shares from 0 to 1; empty where none was measured
    tpot_ms: Floats
    e2e_ms: Floats
    samples: Samples
    hot: tuple[HotPrefix, ...]
    time: TimeSplit | None  # None: nothing was completed
    tokens: TokenSplit
    notes: tuple[str, ...]


def view(result: ReplayResult) -> RunView:
    """Return the view of one result. The view keeps nothing of the result's table of requests."""
    table = result.table
    done = table.verdict == Verdict.COMPLETED
    arrival, sent = table.arrival_ns[done], table.dispatched_ns[done]
    first, finish = table.first_token_ns[done], table.finish_ns[done]
    split = None
    if len(arrival):
        parts = ((sent - arrival), (first - sent), (finish - first))
        split = TimeSplit(*(int(part.sum()) / (len(arrival) * NS_PER_MS) for part in parts))
    asked = sum(total.query_tokens for total in result.workers)
    cached = sum(total.hit_tokens for total in result.workers)
    recomputed = sum(total.recomputed_tokens for total in result.workers)
    return RunView(
        row=summarize(result),
        ttft_ms=_curve(first - arrival),
        tpot_ms=_curve(tpots_ns(table)),
        e2e_ms=_curve(finish - arrival),
        samples=result.samples,
        hot=result.hot,
        time=split,
        tokens=TokenSplit(cached, asked - cached, recomputed),
        notes=result.notes,
    )


def hit_rates(samples: Samples, windows: int) -> tuple[Floats, Floats]:
    """Return (seconds, hit rate 0..1) of all workers over at most `windows` intervals of time.

    The rate of an interval in which nothing was admitted is NaN.
    """
    count = len(samples.time_ns)
    edges = np.unique(np.linspace(0, count, min(windows, count) + 1).round().astype(np.int64))
    times = np.concatenate([[0], samples.time_ns])[edges]
    asked, found = (
        np.concatenate([[0], column.sum(axis=1)])[edges]
        for column in (samples.query_tokens, samples.hit_tokens)
    )
    asked, found = np.diff(asked), np.diff(found)
    rates = np.divide(found, asked, out=np.full(len(asked), np.nan), where=asked > 0)
    return (times[:-1] + times[1:]) / 2e9, rates


def on_grid(time_ns: I64, rows: npt.NDArray[np.generic], columns: int) -> Floats:
    """Return the samples `[samples, workers]`, taken at any times, as `[workers, columns]` of equal
    intervals. The intervals run from 0 to the last sample; each has the value of the sample that
    its middle falls into.
    """
    if not len(time_ns):
        return np.zeros((rows.shape[1], 0))
    columns = min(columns, len(time_ns))
    middles = (np.arange(columns) + 0.5) * (int(time_ns[-1]) / columns)
    picked = np.searchsorted(time_ns, middles).clip(max=len(time_ns) - 1)
    grid: Floats = rows[picked].T.astype(np.float64)
    return grid


def _curve(times_ns: I64) -> Floats:
    if not len(times_ns):
        return np.zeros(0)
    curve: Floats = np.quantile(times_ns, np.linspace(0.0, 1.0, CURVE_POINTS)) / NS_PER_MS
    return curve

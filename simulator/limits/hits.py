"""Hit rates of routing rules over caches alone, without service times."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from math import fsum
from typing import Protocol

import msgspec

from simulator.traces.job import Job


class LruCache:
    """A cache of at most `capacity` block ids; None means no limit. Lifetime: one row of
    a table.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._ids)

    def match(self, ids: Sequence[int]) -> int:
        """Return how many leading ids are cached."""
        present = self._ids
        for depth, block in enumerate(ids):
            if block not in present:
                return depth
        return len(ids)

    def insert(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Touch or add every id, from the last to the first, then evict; return (added, evicted)
        ids.

        So a block is always more recent than those after it, and chains lose their tails first. The
        ids of a chain that is longer than the cache are in both lists.
        """
        present = self._ids
        if self._capacity is None:
            added = [block for block in ids if block not in present]
            present.update(dict.fromkeys(added))
            return added, []
        added = []
        touch = present.move_to_end
        for block in reversed(ids):
            if block in present:
                touch(block)
            else:
                present[block] = None
                added.append(block)
        surplus = len(present) - self._capacity
        return added, [present.popitem(last=False)[0] for _ in range(surplus)]


class Holders:
    """The workers that hold each id, as the bits of one number, so that a block needs one look-up
    in place of one for each worker. Lifetime: one row of a table. For a single worker, `match` and
    `insert` do as in `LruCache`.
    """

    def __init__(self, workers: int, capacity: int | None) -> None:
        self._caches = [LruCache(capacity) for _ in range(workers)]
        self._everybody = (1 << workers) - 1
        self._bits: dict[int, int] = {}  # ids that no worker holds are left out

    def longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return the longest match of any worker, and the bits of the workers that have it."""
        bits = self._bits
        holders = self._everybody
        for depth, block in enumerate(ids):
            still = holders & bits.get(block, 0)
            if not still:
                return depth, holders
            holders = still
        return len(ids), holders

    def match(self, worker: int, ids: Sequence[int]) -> int:
        """Return how many leading ids `worker` holds."""
        return self._caches[worker].match(ids)

    def insert(self, worker: int, ids: Sequence[int]) -> None:
        """Let `worker` compute the blocks of `ids`."""
        bits = self._bits
        bit = 1 << worker
        added, evicted = self._caches[worker].insert(ids)
        for block in added:
            bits[block] = bits.get(block, 0) | bit
        for block in evicted:
            left = bits[block] ^ bit
            if left:
                bits[block] = left
            else:
                del bits[block]


HASH_FACTOR = 2_654_435_761  # Knuth's multiplicative hash: 2^32 over the golden ratio
PAIR_FACTOR = 1_000_003
WINDOW_S = 60.0
MAX_SHARE = 1.25  # `bounded` leaves a worker with more than this times the mean work


class Rule(Protocol):
    """A routing rule with the caches that it chooses between. Lifetime: one row of a table."""

    def place(self, serial: int, at_ns: int, ids: Sequence[int]) -> tuple[int, int]:
        """Return the worker for the request, and how many leading ids it holds; its ids are cached
        there afterwards.
        """

    def charge(self, worker: int, at_ns: int, uncached_tokens: int) -> None:
        """Add the cost of the request that was placed last to the work of `worker`."""


class Blind:
    """A routing rule that does not look at caches: `round_robin`, `random`, `hash_1`, `hash_2`."""

    def __init__(self, name: str, workers: int, capacity: int | None) -> None:
        self._name = name
        self._workers = workers
        self._caches = [LruCache(capacity) for _ in range(workers)]
        self._random = random.Random(1)

    def place(self, serial: int, at_ns: int, ids: Sequence[int]) -> tuple[int, int]:
        worker = self._choose(serial, ids)
        cache = self._caches[worker]
        match = cache.match(ids)
        cache.insert(ids)
        return worker, match

    def charge(self, worker: int, at_ns: int, uncached_tokens: int) -> None:
        """Do nothing, because these rules ignore the cost of earlier requests."""

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
    """Chooses the worker with the longest match; among equals, the one with least uncached work so
    far, then the first.
    """

    def __init__(self, workers: int, capacity: int | None) -> None:
        self._holders = Holders(workers, capacity)
        self._work_tokens = [0] * workers

    def place(self, serial: int, at_ns: int, ids: Sequence[int]) -> tuple[int, int]:
        match, bits = self._holders.longest(ids)
        work = self._work_tokens
        best = min((work[row], row) for row in range(len(work)) if bits >> row & 1)[1]
        worker = self._adjust(best, at_ns)
        if worker != best:
            match = self._holders.match(worker, ids)
        self._holders.insert(worker, ids)
        return worker, match

    def charge(self, worker: int, at_ns: int, uncached_tokens: int) -> None:
        self._work_tokens[worker] += uncached_tokens

    def _adjust(self, best: int, at_ns: int) -> int:
        return best


class Bounded(Greedy):
    """Chooses the worker that `Greedy` chooses, but the worker with least work if the best one had
    over 1.25 times the mean work of the last minute.
    """

    def __init__(self, workers: int, capacity: int | None) -> None:
        super().__init__(workers, capacity)
        self._recent: list[deque[tuple[float, int]]] = [deque() for _ in range(workers)]
        self._recent_tokens = [0] * workers

    def charge(self, worker: int, at_ns: int, uncached_tokens: int) -> None:
        super().charge(worker, at_ns, uncached_tokens)
        self._recent[worker].append((_seconds(at_ns), uncached_tokens))
        self._recent_tokens[worker] += uncached_tokens

    def _adjust(self, best: int, at_ns: int) -> int:
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
    """Return the nanoseconds as seconds, computed as milliseconds times a rounded thousandth and
    not as a quotient, as in the published tables.

    Traces have times in whole seconds, and this rounding decides whether work that is exactly a
    minute old still counts.
    """
    return at_ns / 1_000_000 * 0.001


BLIND = ("round_robin", "random", "hash_1", "hash_2")
POOL_RULES = (*BLIND, "greedy", "bounded")


def make_rule(name: str, workers: int, capacity: int | None) -> Rule:
    """Return the rule called `name`, one of `POOL_RULES`, with empty caches of `capacity` blocks
    each.
    """
    if name == "greedy":
        return Greedy(workers, capacity)
    if name == "bounded":
        return Bounded(workers, capacity)
    return Blind(name, workers, capacity)


RULES = ("single_lru", *POOL_RULES)  # the default
ALL_RULES = (*RULES, "pooled_lru", "ideal")
MAX_WORKERS = 4096


class HitRow(msgspec.Struct, frozen=True):
    """The hit rates of one rule, each in [0, 1].

    The three rates answer different questions. One is the share of all prompt tokens, in full
    blocks only (the saved computation). One is the share of all block ids listed, with a partial
    last block (the view of an index). One is the mean over requests of the share of each prompt
    that listed blocks cover (short prompts weigh as much as long ones).
    """

    rule: str
    workers: int  # caches
    kv_tokens: int | None  # that each of them holds; None: without limit
    requests: int
    hit_rate_tokens: float
    hit_rate_blocks: float
    hit_rate_requests: float
    load_skew: float  # most uncached tokens of a worker over the mean; 1 is even


class _Tally:
    """Adds up the hits of one rule, for one row of the table."""

    def __init__(self, name: str, workers: int, kv_tokens: int | None, block_tokens: int) -> None:
        self.name, self.workers, self.kv_tokens = name, workers, kv_tokens
        capacity = None if kv_tokens is None else max(1, kv_tokens // block_tokens)
        pool_rule = name if name in POOL_RULES else "round_robin"  # of one cache: no choice
        self.rule: Rule = make_rule(pool_rule, workers, capacity)
        self.block_tokens = block_tokens
        self.hit_tokens = self.hit_blocks = 0
        self.shares: list[float] = []  # summed now and then
        self.work_tokens = [0] * workers

    def take(self, serial: int, job: Job, ids: Sequence[int]) -> None:
        """Add one request with number `serial`."""
        worker, match = self.rule.place(serial, job.at_ns, ids)
        full = job.prompt_tokens // self.block_tokens
        hit_tokens = min(match, full) * self.block_tokens
        self.hit_blocks += match
        self.hit_tokens += hit_tokens
        self.shares.append(min(1.0, match * self.block_tokens / job.prompt_tokens))
        self.work_tokens[worker] += job.prompt_tokens - hit_tokens
        self.rule.charge(worker, job.at_ns, job.prompt_tokens - hit_tokens)

    def row(self, requests: int, tokens: int, blocks: int) -> HitRow:
        """Return the finished row for this many requests, prompt tokens and listed ids."""
        work = sum(self.work_tokens)
        return HitRow(
            rule=self.name,
            workers=self.workers,
            kv_tokens=self.kv_tokens,
            requests=requests,
            hit_rate_tokens=self.hit_tokens / tokens if tokens else 0.0,
            hit_rate_blocks=self.hit_blocks / blocks if blocks else 0.0,
            hit_rate_requests=fsum(self.shares) / requests if requests else 0.0,
            load_skew=max(self.work_tokens) * self.workers / work if work else 1.0,
        )


def hits(
    jobs: Iterable[Job],
    *,
    block_tokens: int,
    workers: int,
    kv_tokens: int | None,
    rules: Sequence[str] = RULES,
) -> list[HitRow]:
    """Return one row for each rule, in the order of `rules`, from one pass over `jobs`.

    The rules choose among `workers` caches of `kv_tokens` each (None: without limit), in blocks of
    `block_tokens`, which is also the size of the jobs' blocks. `single_lru` is one cache of
    `kv_tokens`, `pooled_lru` one as large as all of them together, `ideal` one without limit.
    Raises ValueError for an unknown rule or a size out of range.
    """
    _check(block_tokens, workers, kv_tokens, rules)
    pool_tokens = None if kv_tokens is None else kv_tokens * workers
    alone = {"single_lru": kv_tokens, "pooled_lru": pool_tokens, "ideal": None}
    tallies = [
        _Tally(name, 1, alone[name], block_tokens)
        if name in alone
        else _Tally(name, workers, kv_tokens, block_tokens)
        for name in rules
    ]
    requests = tokens = blocks = 0
    for job in jobs:
        ids: list[int] = job.ids.tolist()
        for tally in tallies:
            tally.take(requests, job, ids)
        requests += 1
        tokens += job.prompt_tokens
        blocks += len(ids)
    return [tally.row(requests, tokens, blocks) for tally in tallies]


def _check(block_tokens: int, workers: int, kv_tokens: int | None, rules: Sequence[str]) -> None:
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    if not 1 <= workers <= MAX_WORKERS:
        raise ValueError(f"workers must be 1 to {MAX_WORKERS}, got {workers}")
    if kv_tokens is not None and kv_tokens < block_tokens:
        raise ValueError(
            f"kv_tokens must be at least one block ({block_tokens} tokens), got {kv_tokens}"
        )
    for name in rules:
        if name not in ALL_RULES:
            raise ValueError(f"unknown rule {name!r}; valid ones: {', '.join(ALL_RULES)}")

"""Hit rates of routing rules over caches alone: no service time, so nothing about latency.

Requests are taken in order, their prompt's blocks are in the chosen cache as soon as they arrive,
answers are not cached; the rules know at once what every cache holds. `ideal` is a ceiling for any
routing, the others are landmarks: what simple rules do to hits and to the balance of work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum

import msgspec

from simulator.limits.rules import POOL_RULES, Rule, make_rule
from simulator.traces.job import Job

RULES = ("single_lru", *POOL_RULES)  # without more ado
ALL_RULES = (*RULES, "pooled_lru", "ideal")
MAX_WORKERS = 4096


class HitRow(msgspec.Struct, frozen=True):
    """What one rule reached. Rates are in [0, 1].

    The three rates answer different questions: of all prompt tokens, full blocks only (what is
    saved), of all block ids listed, a partial last one included (what an index sees), and the
    mean over requests of the share of each prompt that listed blocks cover (short prompts weigh
    as much as long ones).
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
    """Sums of one row."""

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
        """One request, the `serial`th."""
        worker, match = self.rule.place(serial, job.at_ns, ids)
        full = job.prompt_tokens // self.block_tokens
        hit_tokens = min(match, full) * self.block_tokens
        self.hit_blocks += match
        self.hit_tokens += hit_tokens
        self.shares.append(min(1.0, match * self.block_tokens / job.prompt_tokens))
        self.work_tokens[worker] += job.prompt_tokens - hit_tokens
        self.rule.charge(worker, job.at_ns, job.prompt_tokens - hit_tokens)

    def row(self, requests: int, tokens: int, blocks: int) -> HitRow:
        """The finished row over so many requests, prompt tokens and listed ids."""
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
    """One row per rule, in the order of `rules`, from one pass over `jobs`.

    `workers` caches of `kv_tokens` each (None: without limit), in blocks of `block_tokens`, the
    size an id of the jobs stands for. `single_lru` is one cache of `kv_tokens`, `pooled_lru` one as
    large as all of them together, `ideal` one without limit. Raises ValueError for an unknown rule
    or a size out of range.
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

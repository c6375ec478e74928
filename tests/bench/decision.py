"""What one decision costs, by the number of workers: hash, index, policy, rest.

    python tests/bench/decision.py [--json] [--decisions N] [--core C]

Each request has a prompt of 32,768 tokens, half of which one in eight workers holds; a decision
is what the core does for it from its arrival to its end (`on_arrival`, `on_first_token`,
`on_finish`). Every figure is a median on one pinned core; the parts are timed by themselves on
the same prompts. Hashing happens before the core sees the request.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from kvkernels import chain_hashes
from policies.contract import Hashes
from policies.facts import Arrival, Finish, FirstToken, Stored, WorkerChange, WorkerFacts
from policies.facts import KvEvents as Events
from policies.load import load
from policies.pick import pick, ranked
from router.core.core import RouterCore
from router.core.hold_queue import Pending
from router.core.settings import CoreSettings

TOKENS = 32_768
PROMPTS = 8
WORKERS = (8, 64, 256, 1_000)
BLOCK_SIZES = (16, 64)


@dataclass(frozen=True)
class Row:
    """One line of the table, in microseconds."""

    workers: int
    block_size: int
    hash_us: float  # chain hashes of the prompt
    index_us: float  # longest prefixes: by events, by our own dispatches, by text
    policy_us: float  # the columns shown to the policy, its costs, the pick
    rest_us: float  # eligibility, ledger, expectations, the facts' own bookkeeping
    decision_us: float  # index + policy + rest, measured as a whole


def median_us(work: Callable[[int], object], count: int) -> float:
    """Median of `count` calls, each with its number."""
    taken = []
    for number in range(count):
        start_s = time.perf_counter()
        work(number)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken) * 1e6


def prompts(block_size: int) -> list[tuple[np.ndarray, Hashes]]:
    """Tokens and chains of the prompts."""
    rng = np.random.default_rng(7)
    tokens = [rng.integers(0, 150_000, TOKENS).astype(np.int32) for _ in range(PROMPTS)]
    return [(one, chain_hashes(one, block_size)) for one in tokens]


def warm_core(workers: int, block_size: int, asked: list[tuple[np.ndarray, Hashes]]) -> RouterCore:
    """A core whose every eighth worker holds the first half of a prompt."""
    settings = CoreSettings(max_workers=workers)
    core = RouterCore(load("hybrid"), settings)
    for worker_id in range(workers):
        facts = WorkerFacts(
            f"w{worker_id}", ("m",), block_size, kv_capacity_tokens=500_000.0, max_requests=64.0
        )
        core.on_worker(WorkerChange(0.0, worker_id, "ready", facts))
        half = asked[worker_id % PROMPTS][0][: TOKENS // 2]
        names = tuple(range(len(half) // block_size))
        stored = Stored(names, None, tuple(half.tolist()), block_size)
        core.on_kv_events(Events(0.0, worker_id, 0, (stored,)))
    return core


def measure(workers: int, block_size: int, decisions: int) -> Row:
    """One row: all parts on the same prompts."""
    asked = prompts(block_size)
    core = warm_core(workers, block_size, asked)

    def arrival(number: int, now_s: float) -> Arrival:
        chain = asked[number % PROMPTS][1]
        return Arrival(now_s, number, "m", TOKENS, {block_size: chain})

    def decide(number: int) -> None:
        now_s = 1.0 + number * 0.01
        core.on_arrival(arrival(number, now_s))
        core.on_first_token(FirstToken(now_s + 0.002, number))
        core.on_finish(Finish(now_s + 0.004, number))

    for number in range(32):
        decide(number)
    decision_us = median_us(lambda n: decide(32 + n), decisions)
    eligible = core.workers.serving("m")
    index_us = median_us(
        lambda n: core.roster.hit_tokens(eligible, {block_size: asked[n % PROMPTS][1]}, TOKENS),
        decisions,
    )
    hits = core.roster.hit_tokens(eligible, {block_size: asked[0][1]}, TOKENS)
    policy_us = median_us(lambda n: _policy_only(core, arrival(n, 99.0), hits), decisions)
    return Row(
        workers=workers,
        block_size=block_size,
        hash_us=median_us(lambda n: chain_hashes(asked[n % PROMPTS][0], block_size), decisions),
        index_us=index_us,
        policy_us=policy_us,
        rest_us=decision_us - index_us - policy_us,
        decision_us=decision_us,
    )


def _policy_only(core: RouterCore, arrival: Arrival, hits: np.ndarray) -> None:
    """What a decision does between the index's answer and the choice, by the core's own code."""
    chooser = core._chooser
    costs = chooser._costs(Pending(arrival, 0, 0.5), core.workers.serving("m"), hits, 99.0)
    pick(costs, 0.5, 0.0)
    ranked(costs, 3)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--decisions", type=int, default=300)
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    rows = [measure(w, size, args.decisions) for size in BLOCK_SIZES for w in WORKERS]
    if args.json:
        print(json.dumps({"results": [asdict(row) for row in rows]}))
        return
    names = ("workers", "block_size", "hash_us", "index_us", "policy_us", "rest_us", "decision_us")
    print("  ".join(f"{name:>11}" for name in names))
    for row in rows:
        print("  ".join(f"{asdict(row)[name]:>11.0f}" for name in names))


if __name__ == "__main__":
    main()

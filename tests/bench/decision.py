"""The decision core's cost of a request: one decision by its parts, and a request's whole life.

    python tests/bench/decision.py [--json] [--decisions N] [--requests N] [--runs N] [--core C]

Decisions: each request has a prompt of 32,768 tokens, half of which one in eight workers holds. A
decision is what the core does from a request's arrival to its end (`on_arrival`, `on_first_token`,
`on_finish`) with the policy hybrid. The parts are timed by themselves on the same prompts. Hashing
happens before the core sees the request.

Lives: prompts have 17 blocks of 512 tokens, nine of them shared by many. Besides a decision, a life
has two progress reports and two batches of KV events by chain hashes: 17 stored blocks in all, and
as many evicted once a worker holds 30 prompts. This is the core's cost in a replay; creating the
facts is counted. Every figure is a median on one pinned core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from kvkernels import chain_hashes
from policies.contract import Hashes
from policies.facts import (
    Arrival,
    Finish,
    FirstToken,
    Progress,
    Removed,
    Stored,
    WorkerChange,
    WorkerFacts,
)
from policies.facts import KvEvents as Events
from policies.load import load
from router.core.contract.actions import Dispatch
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from router.core.placement.eligible import Rows
from router.core.placement.pending import Pending

TOKENS = 32_768
PROMPTS = 8
WORKERS = (8, 64, 256, 1_000)
BLOCK_SIZES = (16, 64)


@dataclass(frozen=True)
class Row:
    """One line of the table of decisions; all times are in microseconds."""

    workers: int
    block_size: int
    hash_us: float  # chain hashes of the prompt
    index_us: float  # longest prefixes: by events, by our own dispatches, by text
    policy_us: float  # the columns shown to the policy, its costs, the pick
    rest_us: float  # eligibility, ledger, expectations, the facts' own bookkeeping
    decision_us: float  # index + policy + rest, measured as a whole


@dataclass(frozen=True)
class Life:
    """One line of the table of request lives: the core's cost of a request from its arrival to its
    last event.
    """

    workers: int
    policy: str
    life_us: float  # CPU time of one request, facts included


def median_us(work: Callable[[int], object], count: int) -> float:
    """Return the median time in microseconds of `count` calls of `work`, each of which gets its
    number.
    """
    taken = []
    for number in range(count):
        start_s = time.perf_counter()
        work(number)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken) * 1e6


def prompts(block_size: int) -> list[tuple[np.ndarray, Hashes]]:
    """Return the token ids and chain hashes of each prompt."""
    rng = np.random.default_rng(7)
    tokens = [rng.integers(0, 150_000, TOKENS).astype(np.int32) for _ in range(PROMPTS)]
    return [(one, chain_hashes(one, block_size)) for one in tokens]


def warm_core(workers: int, block_size: int, asked: list[tuple[np.ndarray, Hashes]]) -> RouterCore:
    """Return a core in which every eighth worker holds the first half of a prompt."""
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
    """Return one row of the table of decisions, with all parts timed on the same prompts."""
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
    rows = Rows.of(core.workers.serving("m"))
    index_us = median_us(
        lambda n: core.caches.hit_tokens(rows, {block_size: asked[n % PROMPTS][1]}, TOKENS),
        decisions,
    )
    choice_us = median_us(lambda n: _choose(core, arrival(n, 99.0), rows), decisions)
    return Row(
        workers=workers,
        block_size=block_size,
        hash_us=median_us(lambda n: chain_hashes(asked[n % PROMPTS][0], block_size), decisions),
        index_us=index_us,
        policy_us=choice_us - index_us,
        rest_us=decision_us - choice_us,
        decision_us=decision_us,
    )


def _choose(core: RouterCore, arrival: Arrival, rows: Rows) -> None:
    """Run the core's steps from the lookup in the index to the choice of a worker."""
    request, fleet = core.chooser._views(Pending(arrival, 0, 0.5), rows, 99.0)
    core.guard.decide(request, fleet)


POLICIES = ("round_robin", "kv_prefix", "hybrid")
LIFE_BLOCK, LIFE_BLOCKS, SHARED_BLOCKS = 512, 17, 9
LIFE_TOKENS = LIFE_BLOCK * LIFE_BLOCKS - 4
TRUNKS = 200
FIRST_TOKEN_AFTER, GROWN_AFTER, END_AFTER = 50, 100, 150  # arrivals
PROMPTS_HELD = 30  # by one worker, beyond their shared part


def life_chains(requests: int) -> list[Hashes]:
    """Return chains of random prompts, each of which continues one of 200 shared beginnings."""
    rng = np.random.default_rng(7)
    trunks = rng.integers(0, 2**63, (TRUNKS, SHARED_BLOCKS), dtype=np.uint64)
    own = rng.integers(0, 2**63, (requests, LIFE_BLOCKS - SHARED_BLOCKS), dtype=np.uint64)
    return [np.concatenate([trunks[n % TRUNKS], tail]) for n, tail in enumerate(own)]


class Lives:
    """A pool that serves many requests: 20 arrive a second, and each is in flight for 7.5 s."""

    def __init__(self, policy: str, workers: int, chains: list[Hashes]) -> None:
        self.core = RouterCore(load(policy), CoreSettings(max_workers=workers))
        self.chains = chains
        self.worker_of = [0] * len(chains)
        self.seq = [0] * workers
        self.held: list[deque[Hashes]] = [deque() for _ in range(workers)]
        for worker_id in range(workers):
            facts = WorkerFacts(f"w{worker_id}", ("m",), LIFE_BLOCK, kv_capacity_tokens=269_000.0)
            self.core.on_worker(WorkerChange(0.0, worker_id, "ready", facts))

    def publish(self, worker_id: int, now_s: float, *events: Stored | Removed) -> None:
        self.core.on_kv_events(Events(now_s, worker_id, self.seq[worker_id], events))
        self.seq[worker_id] += 1

    def arrive(self, number: int, now_s: float) -> None:
        chains = {LIFE_BLOCK: self.chains[number]}
        (action,) = self.core.on_arrival(Arrival(now_s, number, "m", LIFE_TOKENS, chains))
        assert isinstance(action, Dispatch)
        self.worker_of[number] = action.worker_id

    def prefilled(self, number: int, now_s: float) -> None:
        worker_id = self.worker_of[number]
        chain = self.chains[number][:-1]
        self.held[worker_id].append(self.chains[number][SHARED_BLOCKS:])
        stored = Stored(chain, None, (), LIFE_BLOCK, chain=chain)
        if len(self.held[worker_id]) > PROMPTS_HELD:
            self.publish(worker_id, now_s, Removed(self.held[worker_id].popleft()), stored)
        else:
            self.publish(worker_id, now_s, stored)
        self.core.on_first_token(FirstToken(now_s, number))
        self.core.on_progress(Progress(now_s + 0.01, number, 50))

    def end(self, number: int, now_s: float) -> None:
        chain = self.chains[number]
        stored = Stored(chain[-1:], int(chain[-2]), (), LIFE_BLOCK, chain=chain[-1:])
        self.publish(self.worker_of[number], now_s, stored)
        self.core.on_finish(Finish(now_s, number))

    def run_us(self) -> float:
        """Run all requests and return the CPU microseconds for each one; the time of other programs
        does not count.
        """
        requests = len(self.chains)
        start_s = time.process_time()
        for number in range(requests + END_AFTER):
            now_s = 1.0 + 0.05 * number
            if number < requests:
                self.arrive(number, now_s)
            if 0 <= number - FIRST_TOKEN_AFTER < requests:
                self.prefilled(number - FIRST_TOKEN_AFTER, now_s)
            if 0 <= number - GROWN_AFTER < requests:
                self.core.on_progress(Progress(now_s, number - GROWN_AFTER, 100))
            if number >= END_AFTER:
                self.end(number - END_AFTER, now_s)
        return (time.process_time() - start_s) / requests * 1e6


def measure_life(policy: str, workers: int, chains: list[Hashes], runs: int) -> Life:
    """Return the median cost of a request's life over `runs` runs, each with a fresh core."""
    taken = [Lives(policy, workers, chains).run_us() for _ in range(runs)]
    return Life(workers, policy, statistics.median(taken))


def table(rows: list[Row] | list[Life]) -> None:
    """Print a header with the names of the rows' fields, and one line for each row."""
    names = list(asdict(rows[0]))
    print("  ".join(f"{name:>11}" for name in names))
    for row in rows:
        cells = (
            f"{v:>11.0f}" if isinstance(v, float) else f"{v:>11}" for v in asdict(row).values()
        )
        print("  ".join(cells))


def main() -> None:
    """Measure both tables and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--decisions", type=int, default=300)
    parser.add_argument("--requests", type=int, default=2_000, help="of one run of lives")
    parser.add_argument("--runs", type=int, default=5, help="of lives")
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    rows = [measure(w, size, args.decisions) for size in BLOCK_SIZES for w in WORKERS]
    chains = life_chains(args.requests)
    lives = [measure_life(policy, w, chains, args.runs) for policy in POLICIES for w in WORKERS]
    if args.json:
        figures = {"results": [asdict(row) for row in rows], "lives": [asdict(x) for x in lives]}
        print(json.dumps(figures))
        return
    table(rows)
    print()
    table(lives)


if __name__ == "__main__":
    main()

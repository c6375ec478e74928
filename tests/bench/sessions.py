"""The cost of following sessions: in each decision, and in the periodic update of all sessions.

    python -m tests.bench.sessions [--json] [--runs N] [--core C]

The bench times a decision of the default policy by its parts: its view of sessions, costs and pick;
`costs` alone; and all that the core does on an arrival, for the next turn of an idle session and
for a new one. Prompts have 40 blocks of 64 tokens, half of which one session in 500 shares. Hashing
happens before the core sees the request. Every figure is a median of CPU time on one pinned core.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from policies.contract import Hashes
from policies.facts import Arrival, Finish, FirstToken, WorkerChange, WorkerFacts
from policies.load import load
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from router.core.placement.eligible import Rows
from router.core.placement.pending import Pending
from router.core.sessions.sessions import Sessions
from tests.bench.measuring import Row, arguments, pinned, show

SIZES = ((64, 5_000, 60.0), (1_024, 100_000, 200.0))  # workers, live sessions, bar in microseconds
BLOCK, TRUNK_BLOCKS, OWN_BLOCKS = 64, 20, 20
TOKENS = (TRUNK_BLOCKS + OWN_BLOCKS) * BLOCK + 5
TRUNKS = 200
REFRESH_BAR = 3.0  # per cent of a core
BATCH = 10  # calls that one CPU time is taken over


class Pool:
    """A core with many sessions, all of them idle. Lifetime: one size of the bench."""

    def __init__(self, workers: int, sessions: int) -> None:
        settings = CoreSettings(max_workers=workers, session_blocks=1 << 22)
        self.core = RouterCore(load("warmset"), settings)
        for worker_id in range(workers):
            facts = WorkerFacts(f"w{worker_id}", ("m",), BLOCK, kv_capacity_tokens=1e6)
            self.core.on_worker(WorkerChange(0.0, worker_id, "ready", facts))
        rng = np.random.default_rng(7)
        self._trunks = rng.integers(0, 2**63, (TRUNKS, TRUNK_BLOCKS), dtype=np.uint64)
        self._own = rng.integers(0, 2**63, (sessions, OWN_BLOCKS), dtype=np.uint64)
        self.now_s = 1.0
        self._serials = itertools.count()
        self._fresh = rng
        for number in range(sessions):
            self.now_s += 1e-4
            fact = self.arrival(number)
            tracked = self.followed.arrived(fact, fact.chains[BLOCK], BLOCK)
            self.followed.dispatched(tracked, number % workers)
            self.followed.ended(tracked, 200, self.now_s)
        self.followed.refresh(self.now_s + 1.0)
        self.now_s += 1.0
        self.core.ledger.advance(self.now_s)

    @property
    def followed(self) -> Sessions:
        sessions = self.core.session_tracking.sessions
        assert sessions is not None
        return sessions

    def arrival(self, number: int | None) -> Arrival:
        """Return the arrival of a session's next turn, or of a new session's first turn if `number`
        is None.
        """
        serial = next(self._serials)
        if number is None:
            own = self._fresh.integers(0, 2**63, OWN_BLOCKS, dtype=np.uint64)
            return self._fact(serial, f"new {serial}", self._chain(serial, own))
        number %= len(self._own)
        return self._fact(serial, f"s{number}", self._chain(number, self._own[number]))

    def _chain(self, number: int, own: Hashes) -> Hashes:
        return np.concatenate((self._trunks[number % TRUNKS], own))

    def _fact(self, serial: int, session: str, chain: Hashes) -> Arrival:
        return Arrival(self.now_s, serial, "m", TOKENS, {BLOCK: chain}, session=session)


def cpu_us(works: Iterator[Callable[[], object]], runs: int) -> float:
    """Return the median CPU microseconds of a call, timed over batches."""
    taken = []
    for _ in range(runs):
        batch = list(itertools.islice(works, BATCH))
        start_s = time.thread_time()
        for work in batch:
            work()
        taken.append((time.thread_time() - start_s) / BATCH)
    return statistics.median(taken) * 1e6


def decisions(pool: Pool, new: bool) -> Iterator[tuple[Pending, Rows]]:
    """Yield the input of each decision: a pending request and the workers' rows."""
    core = pool.core
    rows = Rows.of(core.workers.serving("m"))
    for number in itertools.count():
        fact = pool.arrival(None if new else number * 37)
        pending = Pending(fact, number, 0.5)
        core.session_tracking.look(pending)
        yield pending, rows


def parts(pool: Pool, new: bool) -> Iterator[Callable[[], object]]:
    """Yield calls that compute hits, the view of sessions, the columns, costs and the pick with the
    core's code.
    """
    core = pool.core

    def decide(pending: Pending, rows: Rows) -> None:
        request, fleet = core.chooser._views(pending, rows, pool.now_s)
        core.guard.decide(request, fleet)

    for asked in decisions(pool, new):
        yield lambda asked=asked: decide(*asked)  # type: ignore[misc]


def costs(pool: Pool, new: bool) -> Iterator[Callable[[], object]]:
    """Yield calls of the policy's own function with the columns of worker data that it needs."""
    core = pool.core
    for asked in decisions(pool, new):
        request, fleet = core.chooser._views(*asked, pool.now_s)
        yield lambda r=request, f=fleet: core.policy.costs(r, f, None)  # type: ignore[misc]


def arrivals(pool: Pool, new: bool) -> Iterator[Callable[[], object]]:
    """Yield calls that handle a whole arrival; earlier requests end between batches, where the
    clock advances.
    """
    core, before = pool.core, -1
    for number in itertools.count():
        if number % BATCH == 0:  # between two batches
            for request_id in range(before, before + BATCH if before >= 0 else before):
                core.on_first_token(FirstToken(pool.now_s, request_id))
                core.on_finish(Finish(pool.now_s, request_id, output_tokens=200))
            pool.now_s += 1e-3
        fact = pool.arrival(None if new else number * 41)
        if number % BATCH == 0:
            before = fact.request_id
        yield lambda fact=fact: core.on_arrival(fact)  # type: ignore[misc]


def refresh_percent(pool: Pool, runs: int) -> float:
    """Return the share of a core that the periodic update of all sessions takes, in per cent."""
    followed, shares = pool.followed, []
    for _ in range(runs):
        period_s = max(0.5, len(followed) / 1e5)  # as often as they are weighed
        pool.now_s += period_s
        start_s = time.thread_time()
        followed.refresh(pool.now_s)
        shares.append((time.thread_time() - start_s) / period_s)
    return statistics.median(shares) * 100.0


def measure(workers: int, sessions: int, bar_us: float, runs: int) -> Iterator[Row]:
    """Yield all rows for one number of workers and sessions."""
    pool = Pool(workers, sessions)
    size = f"{workers:,} workers, {len(pool.followed):,} sessions"
    for new in (False, True):
        turn = "new session" if new else "next turn"
        own_us = cpu_us(costs(pool, new), runs)
        yield Row(f"{size}: costs(), {turn}", own_us, "us")
        yield Row(
            f"{size}: view, costs, pick, {turn}", cpu_us(parts(pool, new), runs), "us", bar_us
        )
    yield Row(f"{size}: weighing all anew", refresh_percent(pool, 11), "% core", REFRESH_BAR)
    for new in (False, True):
        turn = "new session" if new else "next turn"
        yield Row(f"{size}: on_arrival, {turn}", cpu_us(arrivals(pool, new), runs), "us")


def main() -> None:
    """Measure the figures and print them."""
    args = arguments(__doc__ or "", 200).parse_args()
    pinned(args.core)
    show(itertools.chain.from_iterable(measure(*size, args.runs) for size in SIZES), args.json)


if __name__ == "__main__":
    main()

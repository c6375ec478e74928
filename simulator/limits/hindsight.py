"""Assignments found by trying, on the real replay: what is achievable when the future is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from policies.contract import Hashes
from router.core.actions import Decision
from simulator.limits.placed import placed_spec
from simulator.replay.book import Book
from simulator.replay.result import ReplayResult, Verdict
from simulator.replay.station import Station
from simulator.traces.job import Job

Try = Callable[[str, "Watcher"], ReplayResult]  # replays the workload under a policy
MAX_REQUESTS = 2_000
INCOMPLETE = float("inf")


class Hindsight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How hard to try. A try is one replay of the whole workload.

    The roll-out makes up to (choices - 1) x requests of them, the local search `moves`.
    """

    choices: int = 2  # workers tried per arrival, the base policy's own included
    moves: int = 100  # changes tried by the local search
    max_requests: int = 400  # refuse longer workloads, at most `MAX_REQUESTS`


class Watcher:
    """Notes which workers were considered, the chosen one first. Lifetime: one replay."""

    def __init__(self, choices: int = 0) -> None:
        self.candidates: dict[int, list[int]] = {}
        self._choices = choices

    def on_start(self, book: Book) -> None:
        """See `Observer`."""

    def on_dispatch(
        self, row: int, job: Job, chain: Hashes, decision: Decision, workers: Sequence[Station]
    ) -> None:
        """See `Observer`."""
        if self._choices and row not in self.candidates:
            best = [candidate.worker_id for candidate in decision.candidates]
            self.candidates[row] = best[: self._choices]

    def on_sample(self, now_ns: int, workers: Sequence[Station]) -> None:
        """See `Observer`."""

    def on_end(self, row: int) -> None:
        """See `Observer`."""


def objective_ms(result: ReplayResult) -> float:
    """Mean time to first token; infinite when not every request that can run was completed."""
    table = result.table
    done = table.verdict == Verdict.COMPLETED
    if not done.any() or bool((table.verdict == Verdict.FAILED).any()):
        return INCOMPLETE
    total_ns = int((table.first_token_ns - table.arrival_ns)[done].sum())
    return total_ns / int(done.sum()) / 1e6


def roll_out(
    attempt: Try, base: str, options: Hindsight, on_progress: Callable[[int, int], None]
) -> tuple[list[int], float]:
    """(worker of each request, mean time to first token in ms), never worse than `base`.

    At each arrival the base policy's next best choices are tried: requests before it stay where
    they are, those behind it go as the base policy says from there on, with the true future. The
    best is kept. (Policy improvement by roll-out: Bertsekas, Tsitsiklis and Wu, 1997.)
    `on_progress(arrivals done, arrivals)`.
    """
    watcher = Watcher(options.choices)
    result = attempt(base, watcher)
    best_ms, plan, seen = objective_ms(result), result.table.worker.tolist(), watcher.candidates
    completed = _completed(result)
    for row in range(len(plan)):
        on_progress(row, len(plan))
        for worker in seen.get(row, ()):
            if worker == plan[row]:
                continue
            watcher = Watcher(options.choices)
            result = attempt(placed_spec([*plan[:row], worker], base), watcher)
            value_ms = objective_ms(result)
            if value_ms < best_ms and _completed(result) == completed:
                best_ms, plan = value_ms, result.table.worker.tolist()
                # What was told of earlier rows was told by `Placed`, and is done with.
                seen = watcher.candidates
    on_progress(len(plan), len(plan))
    return plan, best_ms


def local_search(
    attempt: Try,
    plan: Sequence[int],
    group_of: Sequence[int],
    workers: int,
    moves: int,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> tuple[list[int], float]:
    """Move one group of requests, or one request, to another worker; keep what is better.

    `group_of`: the group of each row, as `partition.groups` numbers them. Groups and single
    requests are tried in turn, drawn by `seed`.
    """
    random = Random(f"{seed}/local search")
    best = list(plan)
    result = attempt(placed_spec(best), Watcher())
    best_ms, completed = objective_ms(result), _completed(result)
    for number in range(moves if workers > 1 and best else 0):
        on_progress(number, moves)
        row = random.randrange(len(best))
        worker = (best[row] + random.randrange(1, workers)) % workers
        moved = [
            worker if n == row or (number % 2 and group == group_of[row]) else old
            for n, (old, group) in enumerate(zip(best, group_of, strict=True))
        ]
        result = attempt(placed_spec(moved), Watcher())
        value_ms = objective_ms(result)
        if value_ms < best_ms and _completed(result) == completed:
            best_ms, best = value_ms, moved
    on_progress(moves, moves)
    return best, best_ms


def _completed(result: ReplayResult) -> int:
    return int((result.table.verdict == Verdict.COMPLETED).sum())

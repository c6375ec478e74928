"""Assignments found when the future is known, and the policy that replays them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from random import Random
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from policies.contract import FleetView, Floats, Hashes, RequestView
from policies.load import LoadedPolicy, load
from router.core.actions import Decision
from simulator.limits.work import Known, Machine, attention_pairs, step_s
from simulator.replay.result import Book, ReplayResult, Verdict
from simulator.replay.station import Station
from simulator.traces.job import Job

ANYWHERE = -1


@dataclass(frozen=True, slots=True)
class Placed:
    """The nth arrival goes to the nth of `workers` (ids joined by dots); later ones as `then` says.

    Where that worker is not eligible, or its number is -1, `then` chooses among the others.
    Raises ValueError for anything but numbers in `workers`.
    """

    workers: str = ""
    then: str = "round_robin"
    _ids: tuple[int, ...] = field(init=False)
    _then: LoadedPolicy = field(init=False)

    def __post_init__(self) -> None:
        try:
            ids = tuple(int(part) for part in self.workers.split(".") if part)
        except ValueError:
            raise ValueError("workers: expected numbers joined by dots") from None
        object.__setattr__(self, "_ids", ids)
        object.__setattr__(self, "_then", load(self.then))

    def initial_state(self) -> Any:
        return self._then.initial_state()

    def observe(self, fact: Any, state: Any) -> Any:
        return self._then.observe(fact, state)

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        if request.serial < len(self._ids):
            there = fleet.worker_id == self._ids[request.serial]
            if there.any():
                return np.where(there, 0.0, 1.0)
        return self._then.costs(request, fleet, state)


def placed_spec(workers: Sequence[int], then: str = "round_robin") -> str:
    """The policy's specification for `policies.load`."""
    joined = ".".join(map(str, workers))
    return f"simulator.limits.hindsight:Placed?workers={joined}&then={quote(then, safe='')}"


SHARE = 4  # a block that more requests have than 1 in (this x workers) is nobody's own


def groups(known: Known, workers: int) -> list[int]:
    """Group of each request, numbered from 0 in order of first arrival.

    The session where the source tells it. Elsewhere requests belong together when they share the
    first block of their chains that is not so common that one worker alone could not take all
    who have it; a request without such a block stands alone.
    """
    common = len(known) / (SHARE * workers)
    counts: Counter[int] = Counter()
    for chain in known.chains:
        counts.update(chain.tolist())
    numbers: dict[str | int, int] = {}
    found = []
    for serial, (job, chain) in enumerate(zip(known.jobs, known.chains, strict=True)):
        key: str | int
        if job.session is not None:
            key = job.session
        else:
            # Below 0: alone. Chain hashes are not negative.
            key = next((block for block in chain.tolist() if counts[block] <= common), ~serial)
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def partition(known: Known, machines: Sequence[Machine]) -> list[int]:
    """Worker of each request: whole groups, longest work first onto whoever is done first.

    Work is the time of what is not shared, and of the answers as an eighth of a batch decodes
    them. (Longest processing time first: Graham, 1969.) Workers are numbered as the machines
    stand, each kind `count` times.
    """
    kinds = [machine for machine in machines for _ in range(machine.count)]
    group_of = groups(known, len(kinds))
    work_s = [0.0] * (max(group_of) + 1)
    for group, job, shared in zip(group_of, known.jobs, known.shared_tokens, strict=True):
        work_s[group] += _work_s(kinds[0], job.prompt_tokens, shared, job.output_tokens)
    homes = [0] * len(work_s)
    loads = [(0.0, worker) for worker in range(len(kinds))]
    heapify(loads)
    for group in sorted(range(len(work_s)), key=lambda group: (-work_s[group], group)):
        load_s, worker = loads[0]
        homes[group] = worker
        heapreplace(loads, (load_s + work_s[group] / kinds[worker].speed, worker))
    return [homes[group] for group in group_of]


def _work_s(machine: Machine, prompt_tokens: int, shared_tokens: int, output_tokens: int) -> float:
    step_time = machine.step_time
    fullest_s = step_s(step_time, machine.max_num_tokens) / machine.max_num_tokens
    batch = max(1, machine.max_batch_size // 8)
    decode_s = step_s(step_time, batch, batch) / batch + step_time.context_s * prompt_tokens
    pairs = attention_pairs(shared_tokens, prompt_tokens)
    prefill_s = fullest_s * (prompt_tokens - shared_tokens) + step_time.pair_s * pairs
    return prefill_s + decode_s * output_tokens


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

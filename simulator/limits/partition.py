"""A fixed worker for each group of requests, and the policy that sends them there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Any
from urllib.parse import quote

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.load import LoadedPolicy, load
from simulator.limits.work import Known, Machine, attention_pairs, step_s

ANYWHERE = -1


@dataclass(frozen=True, slots=True)
class Placed:
    """Sends the nth arrival to the nth of `workers` (ids joined by dots); later ones as the policy
    `then` says.

    If that worker is not eligible, or its number is -1, `then` chooses among the others. Raises
    ValueError for anything but numbers in `workers`.
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
    """Return the policy's specification for `policies.load`."""
    joined = ".".join(map(str, workers))
    return f"simulator.limits.partition:Placed?workers={joined}&then={quote(then, safe='')}"


SHARE = 4  # a block in more than 1 of (this x workers) requests belongs to no session


def groups(known: Known, workers: int) -> list[int]:
    """Return the number of each request's group; groups are numbered from 0 in order of first
    arrival.

    The group is the session if the source has sessions. Otherwise requests belong together if they
    share the first block of their chains that is not so common that one worker could not take all
    its requests; a request without such a block is a group of its own.
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
    """Return the worker of each request.

    Whole groups, longest work first, go to the worker that is done first. The work of a group is
    the time of its tokens that are not shared, and of its answers as an eighth of a batch decodes
    them. (Longest processing time first: Graham, 1969.) Workers are numbered in the order of the
    machines, each kind `count` times.
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

"""What a plan asks for, workers or a rate, and the ladder of numbers that it is searched on."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal

import msgspec

from simulator.replay.setup import Setup
from simulator.sweep.check import check_setups
from simulator.sweep.errors import SweepError
from simulator.sweep.policy_axis import check_policies
from simulator.sweep.targets import Rule, Targets, check_targets

RATE_STEP = 1.05  # a rate is told to five percent
MIN_RATE_PER_S, MAX_RATE_PER_S = 0.01, 10_000.0
FIRST_RATE_PER_WORKER = 1.0  # where the search begins when nobody says: requests per second
DIGITS = 4


class PlanRequest(msgspec.Struct, frozen=True):
    """The smallest fleet, or the highest rate, at which each policy keeps the targets.

    `base` gives the workload and the world; its fleet is where the search begins. A rate of the
    workload is where the search for a rate begins.
    """

    base: Setup
    policies: tuple[str, ...]
    targets: Targets
    seeds: tuple[int, ...] = (1, 2, 3)
    find: Literal["workers", "rate"] = "workers"
    most_workers: int = 64
    most_runs: int = 500  # over all policies and seeds
    rule: Rule = "all"


def check_request(request: PlanRequest) -> None:
    """Raises `SweepError` with what is wrong, before anything runs."""
    check_targets(request.targets)
    check_policies(list(request.policies))
    problems = []
    if not request.policies or len(set(request.policies)) < len(request.policies):
        problems.append("policies: give one or more, each once")
    if not request.seeds or len(set(request.seeds)) < len(request.seeds):
        problems.append("seeds: give one or more, each once")
    if request.rule == "interval" and len(request.seeds) < 2:
        problems.append("seeds: an interval takes two or more")
    if request.most_workers < 1:
        problems.append(f"most_workers: {request.most_workers}; expected 1 or more")
    if request.find == "workers" and len(request.base.groups) != 1:
        problems.append("groups: the number of workers is searched in a fleet of one group")
    if problems:
        raise SweepError(problems)
    ladder = ladder_of(request)
    check_setups([ladder.place(request.base, ladder.start)])


@dataclass(frozen=True, slots=True)
class Ladder:
    """Numbers of which a larger one is easier on the fleet. Lifetime: one plan."""

    find: Literal["workers", "rate"]
    start: int
    low: int
    high: int

    def value(self, rung: int) -> float:
        """Workers, or requests per second."""
        if self.find == "workers":
            return rung
        return float(f"{RATE_STEP**-rung:.{DIGITS}g}")

    def named(self, rung: int) -> str:
        """As in `7 workers` or `12.4 requests/s`."""
        if self.find == "workers":
            return "1 worker" if rung == 1 else f"{rung} workers"
        return f"{self.value(rung):.3g} requests/s"

    def place(self, base: Setup, rung: int) -> Setup:
        """The set-up at a rung."""
        if self.find == "workers":
            group = msgspec.structs.replace(base.groups[0], count=rung)
            return msgspec.structs.replace(base, groups=(group,))
        workload = msgspec.structs.replace(base.workload, rate_per_s=self.value(rung), speed=1.0)
        return msgspec.structs.replace(base, workload=workload)


def ladder_of(request: PlanRequest) -> Ladder:
    """The ladder that a request is searched on."""
    workers = sum(group.count for group in request.base.groups)
    if request.find == "workers":
        return Ladder("workers", min(workers, request.most_workers), 1, request.most_workers)
    rate = request.base.workload.rate_per_s or FIRST_RATE_PER_WORKER * workers
    low, start, high = (_rung(value) for value in (MAX_RATE_PER_S, rate, MIN_RATE_PER_S))
    return Ladder("rate", start, low, high)


def _rung(rate_per_s: float) -> int:
    return -round(log(rate_per_s) / log(RATE_STEP))

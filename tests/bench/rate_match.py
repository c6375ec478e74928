"""Compares the pool sizes that `rate-match` chooses with the best ones by replays of all sizes.

    python -m tests.bench.rate_match [--workers 4 --workers 8 ...] [--requests 300] [--mode always]

For each workload, profile and number of workers, the bench replays every number of prefill workers
n_P at 95 % of the computed rate. Requests within the targets are good. It prints n_P by arithmetic,
by trials near that as in `rate-match --simulate`, and by all replays; and which share of the best's
good requests the first two reach.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np

from router.core.contract.settings import DisaggregationMode
from simulator.capacity.pools import RATE_SHARE, PoolTrial, WorkerPool, climb, split, trial
from simulator.capacity.rates import Link, Mix, Shape, WaitTargets, measure, prefill_s, step_s
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs

WORKLOADS = {
    "agents": "gen:agentic?sessions=400",
    "one prompt for all": "gen:shared?prefix=6016&suffix=700*0.6&output=170*0.6",
    "translation": "gen:zipf?groups=100000&exponent=0&system=16&question=4400*0.3&output=400*0.3",
    "long in, short out": (
        "gen:zipf?groups=100000&exponent=0&system=16&question=8000*0.4&output=128*0.4"
    ),
    "documents": "gen:zipf?groups=40&exponent=1.1&system=4096&question=1000*0.6&output=200*0.6",
}
PROFILES = ("qwen3-32b-h100-tp2", "llama-3.1-8b-h100", "llama-3-70b-h100-tp8")
BLOCK = 16
SLOWER = 1.6  # target of the time per token, over the shortest step
PATIENCE = 4.0  # target of the TTFT: this many mean prefills, and one long one
EQUAL = 0.005  # counts of good requests this close are equal


@dataclass(frozen=True)
class Outcome:
    """One line of the table: a case's goodput with each number of prefill workers.
    Lifetime: run.
    """

    workload: str
    profile: str
    workers: int
    found: WorkerPool
    trials: dict[int, PoolTrial]  # by the number that prefill
    climbed: int

    @property
    def computed(self) -> int:
        """The number of prefill workers that `rate-match` computes by arithmetic."""
        return int(self.found.workers("prefill"))

    def best(self, beside: int) -> int:
        """Return the best number of prefill workers by all replays; of equally good ones the
        nearest to `beside`.
        """
        top = max(one.good_share for one in self.trials.values())
        near = [n for n, one in self.trials.items() if one.good_share >= top - EQUAL]
        return min(near, key=lambda n: abs(n - beside))

    def share(self, number: int) -> float:
        """Return the good requests with this number of prefill workers as a share of the best
        number's.
        """
        top = max(one.good_share for one in self.trials.values())
        return self.trials[number].good_share / top if top else 1.0


def targets_of(shape: Shape, mix: Mix) -> WaitTargets:
    """Return the latency targets that an operator would set for this workload."""
    floor_s = float(step_s(shape.step_time, 1, 1, 0.0, mix.context))
    each_s = prefill_s(shape.step_time, mix)
    ttft_s = PATIENCE * float(np.mean(each_s)) + float(np.quantile(each_s, 0.99))
    return WaitTargets(SLOWER * floor_s, ttft_s)


def outcome(
    workload: str, profile_name: str, workers: int, requests: int, mode: DisaggregationMode
) -> Outcome | None:
    """Run one case and return its outcome, or None if no pool meets the targets."""
    shape, link = Shape.of(profile_name), Link()
    stream = open_jobs(WorkloadSpec(WORKLOADS[workload], requests=requests))
    caches = max(1, workers // 2)
    mix = measure(stream.jobs, stream.block_tokens, caches, shape.kv_tokens).mix
    targets = targets_of(shape, mix)
    found = split(mix, shape, shape, targets, link, workers * shape.gpus)
    if found is None:
        return None
    spec = WorkloadSpec(
        WORKLOADS[workload], requests=requests, rate_per_s=RATE_SHARE * found.requests_per_s
    )
    tried = partial(trial, spec, targets=targets, link=link, block_size=BLOCK, disaggregation=mode)

    def of(n: int) -> PoolTrial:
        return tried((("prefill", profile_name, n), ("decode", profile_name, workers - n)))

    trials = {n: of(n) for n in range(1, workers)}
    near = climb(int(found.workers("prefill")), workers - 1, trials.__getitem__)
    climbed = max(near, key=lambda one: (round(one.good_share, 3), -one.ttft_s))
    return Outcome(workload, profile_name, workers, found, trials, climbed.prefill_workers)


def study(
    workers: Sequence[int],
    requests: int,
    mode: DisaggregationMode,
    workloads: Sequence[str] = tuple(WORKLOADS),
    profiles: Sequence[str] = PROFILES,
) -> Iterator[Outcome]:
    """Yield the outcome of every case."""
    for count in workers:
        for workload in workloads:
            for profile_name in profiles:
                found = outcome(workload, profile_name, count, requests, mode)
                if found is not None:
                    yield found


def main() -> None:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--mode", choices=get_args(DisaggregationMode), default="always")
    options = parser.parse_args()
    rows = []
    for one in study(options.workers or [4, 8, 16, 32], options.requests, options.mode):
        rows.append(one)
        curve = " ".join(f"{n}:{t.good_share:.2f}" for n, t in one.trials.items())
        print(
            f"{one.workers:3} {one.workload}, {one.profile}: computed {one.computed} "
            f"({one.share(one.computed):.3f}), climbed {one.climbed} "
            f"({one.share(one.climbed):.3f}), best {one.best(one.climbed)}   {curve}",
            flush=True,
        )
    for name in ("computed", "climbed"):
        numbers = [(one, getattr(one, name)) for one in rows]
        apart = [abs(number - one.best(number)) for one, number in numbers]
        shares = [one.share(number) for one, number in numbers]
        print(
            f"{name}: {sum(a <= 1 for a in apart)} of {len(rows)} within 1 of the best, at most "
            f"{max(apart)}; good requests {min(shares):.3f} of the best's and more, "
            f"{sum(s >= 0.97 for s in shares)} at 0.97"
        )


if __name__ == "__main__":
    main()

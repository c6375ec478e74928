"""Replays that take no time: results from a formula, and functions that fail as a run may.

Other processes receive them by name, so they are functions of this module.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random

import msgspec

from simulator.replay.setup import Setup, WorkerGroup
from simulator.report.row import GoodputShare, ReplayRow, Spread, summarize
from simulator.traces.spec import WorkloadSpec
from tests.simulator.replayed import result

PROFILE = "qwen3-32b-h100-tp2"
RATE_PER_WORKER = 5.0  # what a worker of the formula takes before its queue grows
FACTORS = {"round_robin": 1.0, "hybrid": 1.6, "least_requests": 1.2}


def setup(policy: str = "hybrid", seed: int = 0, workers: int = 4, rate: float = 10.0) -> Setup:
    """Return a set-up whose workload exists in no file."""
    workload = WorkloadSpec("gen:none", rate_per_s=rate)
    return Setup(workload, policy, (WorkerGroup(workers, PROFILE),), seed=seed)


def evaluate(setup: Setup) -> ReplayRow:
    """Return a row whose times grow without bound as the rate approaches the pool's limit, which
    depends on the policy.
    """
    name = setup.policy.partition("?")[0]
    workers = sum(group.count for group in setup.groups)
    limit = workers * RATE_PER_WORKER * FACTORS.get(name, 1.0)
    rate = setup.workload.rate_per_s or 10.0
    busy = min(rate / limit, 0.999)
    noise = 1 + 0.05 * Random(f"{setup.seed} {name}").random()
    ttft, tpot = 100 / (1 - busy) * noise, 20 / (1 - busy / 2) * noise
    row = summarize(result(({},), setup=setup, policy=name, params={}))
    return msgspec.structs.replace(
        row,
        ttft_ms=_times(ttft),
        tpot_ms=_times(tpot),
        e2e_ms=_times(ttft + 100 * tpot),
        output_tokens_per_s=round(min(rate, limit) * 100, 3),
        hit_rate_tokens=round(0.5 * FACTORS.get(name, 1.0), 5),
        goodput=GoodputShare(2000.0, 50.0, round(1 - busy**8, 5)),
        wall_s=0.1,
        simulated_s=600.0,
        report_hash=f"{Random(f'{setup}').getrandbits(64):016x}",
    )


def _times(mean: float) -> Spread:
    shares = (1.0, 0.9, 1.5, 1.8, 2.0, 3.0)
    return Spread(*(round(mean * share, 3) for share in shares))


def marks() -> Path:
    """Return the folder in which functions of several processes leave marks for each other."""
    return Path(os.environ["SWEEP_MARKS"])


def killed_once(setup: Setup) -> ReplayRow:
    """Kill this process with SIGKILL on the first try of seed 1, as the kernel would; later tries
    succeed.
    """
    mark = marks() / f"killed-{setup.seed}"
    if setup.seed == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(setup)


def killed_always(setup: Setup) -> ReplayRow:
    """Leave a mark and kill this process on every try of seed 1."""
    if setup.seed == 1:
        (marks() / f"try-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(setup)


def raises(setup: Setup) -> ReplayRow:
    """Leave a mark and raise ValueError on every try of seed 1."""
    if setup.seed == 1:
        (marks() / f"try-{len(list(marks().iterdir()))}").touch()
        raise ValueError("a prompt of 9,000 tokens fits no worker")
    return evaluate(setup)


def stays(setup: Setup) -> ReplayRow:
    """Return at once for seed 0; for other seeds leave the process id as a mark and never
    return.
    """
    if setup.seed:
        (marks() / f"pid-{os.getpid()}").touch()
        signal.pause()
    return evaluate(setup)


def counted(setup: Setup) -> ReplayRow:
    """Leave a mark for each run and return its row."""
    (marks() / f"run-{setup.policy}-{setup.seed}-{os.getpid()}-{os.urandom(4).hex()}").touch()
    return evaluate(setup)

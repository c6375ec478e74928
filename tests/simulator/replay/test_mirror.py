"""Tests of replays without KV events on workers with little memory: the hits that the router
expects are those that the workers find.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from simulator.replay.setup import World
from simulator.traces.job import Job
from tests.simulator.replays import job, pool, run, setup_of


def visits(seed: int, count: int = 700) -> list[Job]:
    """Return requests with forty shared prefixes, the first of which are more frequent; a prefix
    may be evicted before its next request.
    """
    rng = random.Random(seed)
    jobs = []
    for number in range(count):
        trunk = min(int(rng.expovariate(0.08)), 39)
        jobs.append(job(number * 60.0, 960, rng.randint(1, 200), trunk=trunk, own=number + 10))
    return jobs


@pytest.mark.parametrize("policy", ["hybrid", "kv_prefix"])
@pytest.mark.parametrize("seed", [1, 2])
def test_expected_hits_without_events_are_close_to_real_hits(policy: str, seed: int) -> None:
    setup = setup_of(policy, pool(2, kv_tokens=12_000), world=World(events=False))
    table = run(visits(seed), setup).table
    error = table.expected_hit_tokens.astype(np.int64) - table.hit_tokens
    late = np.abs(error[len(error) // 2 :])
    found = table.hit_tokens[len(error) // 2 :]
    assert 0.2 < (found > 0).mean() < 0.98  # some are evicted, some are not
    # A router that believed for good would expect every trunk seen before, found or not.
    assert (late > 16).mean() < 0.4 * (found == 0).mean()
    assert late.mean() < 90

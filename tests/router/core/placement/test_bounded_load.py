"""Tests of the bound on load that the wrapper `bounded_load` proves, over random histories with the
real ledger and core.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies.facts import Arrival, Failure, Finish, FirstToken, Tick, WorkerChange, WorkerFacts
from policies.load import load
from router.core.contract.actions import Dispatch
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from tests.effort import examples

BLOCK = 16
SPEEDS = (2_000.0, 10_000.0, 10_000.0, 40_000.0)  # tokens/s; each worker has one of them


class BoundedWorld:
    """A random history of workers of several speeds and a few popular prompts. Lifetime:
    example.
    """

    def __init__(self, policy: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.core = RouterCore(load(policy), CoreSettings(max_workers=8), seed)
        self.now_s = 0.0
        self.workers = self.random.randint(1, 8)
        for worker_id in range(self.workers):
            rate = self.random.choice(SPEEDS)
            facts = WorkerFacts(
                f"w{worker_id}",
                ("m",),
                BLOCK,
                prefill_tokens_per_s=rate,
                step_s=self.random.choice((0.005, 0.02)),
                has_events=False,
            )
            self.core.on_worker(WorkerChange(0.0, worker_id, "ready", facts))
        self.first: list[int] = []  # dispatched, before their first token
        self.running: list[int] = []
        self.next_id = 0

    def loads_s(self) -> np.ndarray:
        """Return the queued work of every worker in seconds, read from the ledger."""
        self.core.ledger.advance(self.now_s)
        columns, rows = self.core.columns, slice(0, self.workers)
        rates = columns.prefill_tokens_per_s[rows]
        steps = np.median(columns.step_s[rows] * rates)
        queued = columns.charged_work[rows] - columns.drained_work[rows]
        return (queued + columns.requests[rows] * steps) / rates

    def uncached_s(self, tokens: int) -> float:
        """Return the seconds that a prompt takes at the slowest worker if none of it is cached."""
        columns, rows = self.core.columns, slice(0, self.workers)
        rates = columns.prefill_tokens_per_s[rows]
        work = columns.attention.work(tokens, 0)
        return float((work + np.median(columns.step_s[rows] * rates)) / rates.min())

    def arrive(self) -> tuple[float, float, float]:
        """Let one request arrive; return its worker's load afterwards, the mean load before, and
        the greatest work w_max of a request.
        """
        blocks = self.random.choice((4, 40, 400))
        trunk = np.arange(1, blocks + 1, dtype=np.uint64) + np.uint64(
            1_000_000 * self.random.randint(1, 2)
        )
        own = np.arange(4, dtype=np.uint64) + np.uint64(10**9 + 10 * self.next_id)
        chain = np.concatenate((trunk, own))
        tokens = len(chain) * BLOCK
        mean_s, most_s = float(self.loads_s().mean()), self.uncached_s(tokens)
        arrival = Arrival(self.now_s, self.next_id, "m", tokens, {BLOCK: chain})
        self.next_id += 1
        (action,) = self.core.on_arrival(arrival)
        assert isinstance(action, Dispatch), f"it never holds or rejects: {action}"
        self.first.append(arrival.request_id)
        return float(self.loads_s()[action.worker_id]), mean_s, most_s

    def random_event(self) -> None:
        """Let a random event other than an arrival happen."""
        self.now_s += self.random.expovariate(20.0)
        kind = self.random.randrange(4)
        if kind == 0 and self.first:
            request_id = self.first.pop(self.random.randrange(len(self.first)))
            self.core.on_first_token(FirstToken(self.now_s, request_id))
            self.running.append(request_id)
        elif kind == 1 and self.running:
            request_id = self.running.pop(self.random.randrange(len(self.running)))
            self.core.on_finish(Finish(self.now_s, request_id))
        elif kind == 2 and self.first:
            request_id = self.first.pop(0)
            self.core.on_failure(Failure(self.now_s, request_id, "client"))
        else:
            self.core.on_tick(Tick(self.now_s))


@pytest.mark.parametrize(
    "inner",
    [
        "kv_prefix",
        "round_robin",
        pytest.param("hybrid", marks=pytest.mark.full),
        pytest.param("least_requests", marks=pytest.mark.full),
    ],
)
@hypothesis_settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), epsilon=st.sampled_from([0.0, 0.25, 1.0]))
def test_no_dispatch_exceeds_the_load_bound(inner, seed, epsilon):
    world = BoundedWorld(f"{inner}|bounded_load?epsilon={epsilon}", seed)
    for _ in range(150):
        after_s, mean_s, most_s = world.arrive()
        bound_s = (1.0 + epsilon) * mean_s + most_s
        assert after_s <= bound_s * (1.0 + 1e-6), (world.now_s, mean_s, most_s)
        for _ in range(world.random.randrange(3)):
            world.random_event()


def test_the_same_histories_without_the_wrapper_exceed_the_bound():
    broken = 0
    for seed in range(10):
        world = BoundedWorld("kv_prefix", seed)
        for _ in range(150):
            after_s, mean_s, most_s = world.arrive()
            broken += after_s > 1.25 * mean_s + most_s
            for _ in range(world.random.randrange(3)):
                world.random_event()
    assert broken > 100

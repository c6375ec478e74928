"""Tests of the controller of roles on virtual time: how close it comes to the best numbers of
prefill and decode workers, and that it settles.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Role
from router.core.workers.columns import WorkerColumns
from router.core.workers.roles import RoleController, RoleSettings, WorkMeter
from tests.router.core.core_world import World

DRAIN_S = 10.0
MIXES = {"prompts": (4.0, 1.0), "answers": (1.0, 3.0), "even": (2.0, 2.0), "more": (1.0, 7.0)}


class Fluid:
    """A pool without queues, whose throughput is the smaller of what its prefill and its decode
    workers can carry. Lifetime: test.

    `mix` is the work of a request in seconds of a worker, for prefill and for decode.
    """

    def __init__(self, workers: int, prefill: int, *, fixed: bool = False) -> None:
        self.now_s = 0.0
        self.fixed = fixed
        self.counts: dict[Role, int] = {"prefill": prefill, "decode": workers - prefill}
        self.controller = RoleController(RoleSettings())
        self.changes: list[tuple[float, Role]] = []
        self._turning: tuple[Role, float] | None = None

    def run(
        self, mix: tuple[float, float], seconds: int, load: float = 9.0, noise: float = 0.0
    ) -> float:
        """Return how many requests the pool carried. `load` is what arrives, in requests/s times
        the sum of their work.
        """
        draw = random.Random(int(self.now_s))
        carried = 0.0
        for _ in range(seconds):
            self.now_s += 1.0
            if self._turning is not None and self.now_s >= self._turning[1]:
                self.counts[self._turning[0]] += 1
                self._turning = None
            prefill, decode = self.counts["prefill"], self.counts["decode"]
            p, d = (work * draw.uniform(1 - noise, 1 + noise) for work in mix)
            rate = min(load / sum(mix), prefill / p, decode / d)
            carried += rate
            self.controller.observe(self.now_s, rate * p, rate * d)
            if self._turning is None and not self.fixed:
                self._decide()
        return carried

    def _decide(self) -> None:
        prefill, decode = self.counts["prefill"], self.counts["decode"]
        change = self.controller.decide(self.now_s, prefill, decode)
        if change is not None:
            other: Role = "decode" if change.role == "prefill" else "prefill"
            self.counts[other] -= 1
            assert self.counts[other] >= 1, "no half is given up"
            self._turning = change.role, self.now_s + DRAIN_S
            self.changes.append((self.now_s, change.role))


def best_fixed(
    pool: Fluid, mix: tuple[float, float], seconds: int, load: float, noise: float
) -> float:
    """Return how many of the same requests the best fixed numbers of workers carry."""
    workers, found = sum(pool.counts.values()), []
    for prefill in range(1, workers):
        fixed = Fluid(workers, prefill, fixed=True)
        fixed.now_s = pool.now_s
        found.append(fixed.run(mix, seconds, load, noise))
    return max(found)


@pytest.mark.parametrize("workers", [4, pytest.param(8, marks=pytest.mark.full), 16])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_each_phase_of_a_changing_mix_nearly_reaches_the_best_fixed_split(
    workers: int, noise: float
) -> None:
    pool = Fluid(workers, workers // 2)
    phase_s, load = 3_600, 1.2 * workers
    shares = []
    for mix in (*MIXES.values(), *MIXES.values()):
        best = best_fixed(pool, mix, phase_s, load, noise)
        shares.append(pool.run(mix, phase_s, load, noise) / best)
    print(f"\n{workers} workers, noise {noise:.0%}:", [f"{share:.1%}" for share in shares])
    assert min(shares) >= 0.95
    assert len(pool.changes) <= 3 * workers * 2


@given(
    p=st.floats(0.2, 5.0),
    d=st.floats(0.2, 5.0),
    workers=st.integers(3, 16),
    noise=st.floats(0.0, 0.4),
    seed=st.integers(0, 1_000),
)
def test_a_steady_mix_causes_no_repeated_role_changes(
    p: float, d: float, workers: int, noise: float, seed: int
) -> None:
    """With a steady mix of requests, no worker changes its role back and forth once the best
    numbers are found.
    """
    pool = Fluid(workers, max(workers // 2, 1))
    pool.now_s = float(seed)
    pool.run((p, d), 1_200, 1.5 * workers, noise)
    before = len(pool.changes)
    pool.run((p, d), 7_200, 1.5 * workers, noise)
    assert len(pool.changes) - before <= 2


def test_a_fast_alternating_mix_causes_fewer_and_fewer_role_changes() -> None:
    pool = Fluid(8, 4)
    counts = []
    for _ in range(4):
        before = len(pool.changes)
        for _ in range(10):
            pool.run(MIXES["prompts"], 60)
            pool.run(MIXES["answers"], 60)
        counts.append(len(pool.changes) - before)
    assert counts[-1] <= 2, counts


def test_an_idle_or_too_small_pool_causes_no_role_changes() -> None:
    pool = Fluid(8, 4)
    pool.run(MIXES["prompts"], 3_600, load=2.0)
    assert pool.changes == []
    small = Fluid(2, 1)
    small.run(MIXES["prompts"], 3_600)
    assert small.changes == []


def test_a_role_change_states_its_reason() -> None:
    pool = Fluid(8, 4)
    pool.run(MIXES["prompts"], 60)
    for _ in range(100):
        pool.controller.observe(pool.now_s, 4.0, 1.0)
        change = pool.controller.decide(pool.now_s, 4, 4)
        pool.now_s += 1.0
        if change is not None:
            break
    assert change is not None
    assert str(change).startswith("work of 3.46 workers to prefill and 0.86 to decode: with 6")


def test_the_work_meter_reads_the_columns() -> None:
    world = World(workers=0)
    for worker_id, role in enumerate(("prefill", "decode")):
        facts = {"group": "g", "prefill_tokens_per_s": 1_000.0, "kv_capacity_tokens": 1_000.0}
        world.join(worker_id, role=role, **facts)
    columns: WorkerColumns = world.core.columns
    prefill, decode = world.core.workers
    meter = WorkMeter()
    assert meter.read(0.0, columns, [prefill], [decode]) == (0.0, 0.0)
    columns.drained_work[prefill.slot] += 500.0
    columns.context_tokens[decode.slot] = 475.0
    assert meter.read(1.0, columns, [prefill], [decode]) == (0.5, 0.5)
    columns.drained_work[prefill.slot] = 0.0  # its slot is another's
    assert meter.read(2.0, columns, [prefill], [decode])[0] == 0.0
    columns.kv_capacity_tokens[decode.slot] = float("nan")
    columns.requests[decode.slot] = 32
    assert meter.read(3.0, columns, [prefill], [decode])[1] == 0.5


def test_a_refused_role_change_is_not_retried_at_once() -> None:
    pool = Fluid(8, 4, fixed=True)
    pool.run(MIXES["prompts"], 100)
    waits = 0
    pool.controller.refused(pool.now_s)
    while pool.controller.decide(pool.now_s, 4, 4) is None:
        pool.run(MIXES["prompts"], 1)
        waits += 1
    assert waits > 480

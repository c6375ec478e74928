"""Tests of policies with wrappers in the simulator: how long a request waits, and which weight
follows the load.
"""

from __future__ import annotations

import numpy as np
import pytest

from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup, World
from simulator.report.row import summarize
from simulator.traces.spec import WorkloadSpec

TICK_MS = 50.0
TRUNKS = "gen:zipf?requests=400&groups=12&system=4096&question=512&output=60"


def of(policy: str, rate: float, seed: int = 1, source: str = TRUNKS):
    """Replay `rate` requests per second on eight workers; all prompts share 4,096 tokens."""
    workers = WorkerGroup(8, "qwen3-32b-h100-tp2", kv_tokens=400_000)
    world = World(tick_ms=TICK_MS)
    spec = WorkloadSpec(f"{source}&rate={rate}")
    return replay(Setup(spec, policy, (workers,), seed=seed, world=world))


@pytest.mark.parametrize("max_wait_s", [0.05, 0.4])
@pytest.mark.parametrize("inner", ["least_requests", "kv_prefix|thresholds?max_queued_tokens=800"])
def test_late_binding_serves_all_requests_within_its_maximum_wait(inner, max_wait_s):
    result = of(f"{inner}|late_binding?max_wait_s={max_wait_s}", 120.0)
    held_ms = result.table.held_ns / 1e6
    assert result.holds >= 5
    assert held_ms.max() <= max_wait_s * 1000.0 + TICK_MS
    row = summarize(result)
    assert row.completed == row.requests
    assert row.rejections == {}


@pytest.mark.parametrize("inner", ["kv_prefix", "hybrid"])
@pytest.mark.parametrize("rate", [4.0, 40.0])
def test_late_binding_holds_nothing_where_holding_does_not_pay(inner, rate):
    plain, late = of(inner, rate), of(f"{inner}|late_binding", rate)
    assert late.holds == 0
    np.testing.assert_array_equal(late.table.first_token_ns, plain.table.first_token_ns)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_progressive_gives_affinity_at_low_load_and_balance_at_high_load(seed):
    def row(policy: str, rate: float):
        return summarize(of(policy, rate, seed))

    affine, progressive = (row(p, 2.0) for p in ("kv_prefix", "kv_prefix|progressive"))
    assert progressive.hit_rate_tokens >= affine.hit_rate_tokens - 0.01
    affine, hybrid, progressive = (
        row(p, 45.0) for p in ("kv_prefix", "hybrid", "kv_prefix|progressive")
    )
    assert progressive.ttft_ms.mean <= 1.05 * hybrid.ttft_ms.mean
    assert progressive.ttft_ms.mean <= 0.8 * affine.ttft_ms.mean
    assert progressive.load_skew_busy <= 1.1


@pytest.mark.parametrize("wrapper", ["bounded_load", "thresholds?spread=2", "progressive"])
def test_each_wrapper_removes_the_hot_spot(wrapper):
    one = "gen:sglang?groups=1&prompts=300&system=6000&question=500&output=30"
    plain, cured = (
        summarize(of(policy, 36.0, source=one)) for policy in ("kv_prefix", f"kv_prefix|{wrapper}")
    )
    assert plain.load_skew_busy == 8.0
    assert cured.load_skew_busy <= 4.5
    assert cured.ttft_ms.mean <= 0.1 * plain.ttft_ms.mean

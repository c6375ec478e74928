"""Tests of the replay loop: times computed by hand, order, that no request is lost, refusals,
determinism.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from engine.profiles import profile
from simulator.replay.result import NEVER, ReplayResult, Verdict
from simulator.replay.setup import ReplayError, World
from simulator.traces.job import Job
from tests.oracles.virtual_worker import plain_workers
from tests.simulator.replays import PROFILE, job, pool, run, setup_of, steady


def same(one: ReplayResult, other: ReplayResult) -> bool:
    """Return whether two results have equal tables, bit for bit."""
    return all(
        np.array_equal(getattr(one.table, f.name), getattr(other.table, f.name))
        for f in fields(one.table)
    )


def test_the_time_of_one_request_is_its_steps_and_the_network() -> None:
    result = run([job(5.0, 640, 3)], setup_of("round_robin", pool(1), world=World(network_ms=2.0)))
    step_time = profile(PROFILE).step_time
    prefill_ns = round((step_time.prefill_s(640)) * 1e9)
    decode_ns = [round(step_time.decode_step_s(1, 640 + n) * 1e9) for n in (1, 2)]
    table = result.table
    assert table.arrival_ns.tolist() == [5_000_000]
    assert table.dispatched_ns.tolist() == [5_000_000]
    assert table.first_token_ns[0] == pytest.approx(5_000_000 + prefill_ns + 4_000_000, abs=2)
    assert table.finish_ns[0] - table.first_token_ns[0] == pytest.approx(sum(decode_ns), abs=2)
    assert table.output_tokens.tolist() == [3]
    assert table.hit_tokens.tolist() == [0]
    assert result.simulated_ns == table.finish_ns[0] - 5_000_000
    assert result.workers[0].steps == 3


def test_the_router_and_the_worker_find_a_cached_prefix() -> None:
    jobs = [job(0, 640, 2, trunk=1, own=1), job(1000, 640, 2, trunk=1, own=2)]
    result = run(jobs, setup_of("kv_prefix", pool(3)))
    assert result.table.worker[0] == result.table.worker[1]
    assert result.table.expected_hit_tokens.tolist() == [0, 320]
    assert result.table.hit_tokens.tolist() == [0, 320]


def test_the_same_setup_gives_the_same_table() -> None:
    jobs = steady(200, 8.0)
    one, other = run(jobs, setup_of("hybrid")), run(jobs, setup_of("hybrid"))
    assert same(one, other)
    assert (one.table.verdict == Verdict.COMPLETED).all()
    assert not same(one, run(jobs, setup_of("random")))


def test_python_workers_give_the_same_table() -> None:
    jobs = steady(200, 4.0)
    groups = (pool(2, kv_tokens=4096),)
    for policy in ("hybrid", "random"):
        native = run(jobs, setup_of(policy, *groups))
        with plain_workers():
            assert same(native, run(jobs, setup_of(policy, *groups)))


def test_prompts_that_fit_no_worker_are_counted_with_the_engines_error_code() -> None:
    jobs = [job(0, 100, 4), job(1, 900, 4), job(2, 100, 4)]
    result = run(jobs, setup_of("round_robin", pool(2, kv_tokens=800)))
    assert result.rejections == {"kv_capacity": 1}
    assert result.table.verdict.tolist() == [0, Verdict.REJECTED, 0]
    assert result.table.finish_ns[1] == NEVER


def test_a_pool_that_can_run_no_request_is_refused_before_the_run() -> None:
    with pytest.raises(ReplayError, match=r"has 900 tokens, a worker takes 800.*kv_tokens"):
        run([job(1, 900, 4)], setup_of("round_robin", pool(2, kv_tokens=800)))
    with pytest.raises(ReplayError, match="less than one block"):
        run([job(1, 90, 4)], setup_of("round_robin", pool(2, kv_tokens=15)))


def test_an_id_behind_another_prefix_is_another_block() -> None:
    ids = (np.array([1, 2, 3], dtype=np.uint64), np.array([4, 2, 3], dtype=np.uint64))
    jobs = [Job(n * 1_000_000_000, 50, 4, ids[n % 2]) for n in range(3)]
    result = run(jobs, setup_of("round_robin", pool(1)))
    assert result.table.hit_tokens.tolist() == [0, 0, 48]


def test_blocks_larger_than_the_sources_are_shared_only_if_full() -> None:
    jobs = [job(0, 640, 2, own=1), job(1000, 640, 2, own=2)]
    result = run(jobs, setup_of("kv_prefix", pool(1), block_size=128))
    assert result.block_size == 128
    assert result.table.prompt_blocks.tolist() == [5, 5]
    assert result.table.hit_tokens.tolist() == [0, 256]  # 320 tokens are equal

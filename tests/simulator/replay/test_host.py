"""Tests of pools whose workers keep evicted KV in host memory: the time to load it, and what
routers know of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.profiles import gpus_of, profile
from simulator.replay.result import ReplayResult
from simulator.replay.setup import HOST_LOAD_GBPS, ReplayError, Setup, World
from simulator.report.row import summarize
from tests.effort import examples
from tests.simulator.replays import PROFILE, job, pool, run, setup_of
from tests.simulator.twins import assert_twins_agree, requests_up_to

MS = 1_000_000
MODEL = profile(PROFILE)
NETWORK_MS = 0.5


def hosted(policy: str = "hybrid", count: int = 1, **more: Any) -> Setup:
    """Return a set-up whose workers hold 6,400 tokens each on the GPU, and ten times as many in
    host memory.
    """
    world = more.pop("world", World())
    group = {"kv_tokens": 6_400, "host_kv_tokens": 64_000} | more
    return setup_of(policy, pool(count, **group), world=world)


def test_a_hit_in_host_memory_costs_its_load_and_the_remaining_prefill() -> None:
    jobs = [job(0, 6_008, 1, trunk=1), job(5_000, 6_008, 1, trunk=2), job(9_000, 6_008, 1, trunk=1)]
    result = run(jobs, hosted(kv_tokens=6_016))  # one such prompt and no more
    table, size = result.table, result.block_size
    loaded = (6_008 - 1) // size * size
    assert table.hit_tokens.tolist() == table.expected_hit_tokens.tolist() == [0, 0, loaded]
    assert result.workers[0].host_hit_tokens == loaded
    rate = HOST_LOAD_GBPS * 1e9 * gpus_of(PROFILE) / 8 / MODEL.kv_bytes_per_token
    rest_s = MODEL.step_time.prefill_s(6_008 - loaded, loaded)
    ttft_ms = (table.first_token_ns - table.arrival_ns)[2] / MS
    assert ttft_ms == pytest.approx(2 * NETWORK_MS + 1e3 * (loaded / rate + rest_s), rel=1e-6)
    assert summarize(result).host_hit_rate_tokens == round(loaded / (3 * 6_008), 5)


def test_without_host_memory_nothing_changes() -> None:
    """A host memory of 0 tokens changes nothing, not even the hash of a set-up or of a report."""
    jobs = [job(0, 600, 3, trunk=1), job(50, 600, 3, trunk=1)]
    plain = setup_of("hybrid", pool(2))
    told = msgspec.structs.replace(plain, groups=(pool(2, host_kv_tokens=0),))
    assert summarize(run(jobs, plain)).report_hash == summarize(run(jobs, told)).report_hash
    assert b"host" not in msgspec.json.encode(plain)


def alternating(count: int) -> list[Any]:
    """Return `count` turns of each of eight sessions in alternation, with prompts of 2,000 tokens
    and more.
    """
    return [
        job(400 * n, 2_000 + 160 * (n // 8), 2, trunk=n % 8, session=f"s{n % 8}")
        for n in range(8 * count)
    ]


def mean_ttft(result: ReplayResult) -> float:
    return float(np.mean(result.table.first_token_ns - result.table.arrival_ns))


@pytest.mark.parametrize("policy", ["hybrid", "warmset"])
def test_a_router_with_host_events_uses_blocks_in_host_memory(policy: str) -> None:
    told = run(alternating(8), hosted(policy, count=2))
    blind = run(alternating(8), hosted(policy, count=2, world=World(host_events=False)))
    assert mean_ttft(told) < mean_ttft(blind)
    assert np.array_equal(told.table.expected_hit_tokens, told.table.hit_tokens)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"host_load_gbps": 0.0}, ".host_load_gbps: 0.0; expected above 0, to 1e"),
        ({"host_load_gbps": float("nan")}, ".host_load_gbps: nan; expected above 0, to 1e"),
        ({"host_kv_tokens": -1}, ".host_kv_tokens: -1; expected 0 or more"),
        (
            {"host_kv_tokens": 15},
            " .*: host_kv_tokens 15 is less than one block of 16 tokens; give",
        ),
    ],
)
def test_the_error_for_an_impossible_host_memory_names_the_field(
    more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ReplayError, match=rf"groups\[0\]{said}"):
        run([job(0, 100, 1)], hosted(**more))


@settings(max_examples=examples(25), deadline=None)
@given(
    requests=requests_up_to(1500),
    host_kv_tokens=st.sampled_from((64, 640, 6_400)),
    gbps=st.sampled_from((0.5, 20.0, 1e5)),
    loss=st.sampled_from((0.0, 0.3)),
)
def test_python_and_native_workers_give_the_same_result(
    requests, host_kv_tokens, gbps, loss
) -> None:
    setup = setup_of(
        "hybrid",
        pool(2, kv_tokens=1_600, host_kv_tokens=host_kv_tokens, host_load_gbps=gbps),
        world=World(event_loss=loss),
    )
    assert_twins_agree(requests, setup)

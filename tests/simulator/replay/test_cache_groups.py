"""Tests of pools whose workers cache sliding windows and states in addition to full attention, and
of what routers know of these caches.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.replay.setup import ReplayError, Setup, World
from simulator.report.row import summarize
from tests.effort import examples
from tests.simulator.replays import job, pool, run, setup_of
from tests.simulator.twins import assert_twins_agree, requests_up_to

GROUPS = ["window:128", "window:40*3", "state*2", "window:64+state*4"]


def hybrid(
    policy: str = "hybrid", count: int = 1, groups: str = "window:128", **more: Any
) -> Setup:
    world = more.pop("world", World())
    return setup_of(policy, pool(count, cache_groups=groups, **more), world=world)


def test_a_shared_prefix_is_hit_from_the_third_request_on() -> None:
    """Workers find a shared beginning from the third request on, as vLLM does, and a router that
    follows the cache groups expects it.
    """
    jobs = [job(2_000 * n, 1_600 + 160 * n, 2, trunk=1, session=f"s{n}") for n in range(1)]
    jobs += [job(2_000 * n, 1_200, 2, trunk=1, session=f"s{n}") for n in range(1, 5)]
    result = run(jobs, hybrid())
    assert result.table.hit_tokens.tolist() == [0, 0, 1_184, 1_184, 1_184]
    assert result.table.expected_hit_tokens.tolist() == [0, 0, 1_184, 1_184, 1_184]


def test_empty_cache_groups_change_nothing() -> None:
    """An empty `cache_groups` changes nothing, not even the hash of a set-up or of a report."""
    jobs = [job(0, 600, 3, trunk=1), job(50, 600, 3, trunk=1)]
    plain = setup_of("hybrid", pool(2))
    told = msgspec.structs.replace(plain, groups=(pool(2, cache_groups=""),))
    assert summarize(run(jobs, plain)).report_hash == summarize(run(jobs, told)).report_hash
    assert b"cache_groups" not in msgspec.json.encode(plain)


@pytest.mark.parametrize("groups", GROUPS)
def test_sequential_requests_hit_exactly_the_expected_tokens(groups: str) -> None:
    """Requests that run alone find as much cached as the router expected. The caches are small and
    evict, prompts are cut and continued, and batches of events get lost.
    """
    draw = np.random.default_rng(5)
    jobs = [
        job(3_000 * n, int(draw.integers(1, 1_500)), 20, trunk=int(draw.integers(3)))
        for n in range(300)
    ]
    result = run(jobs, hybrid(groups=groups, kv_tokens=3_200, count=2))
    table = result.table
    assert table.expected_hit_tokens.tolist() == table.hit_tokens.tolist()
    assert (table.hit_tokens > 0).sum() > 50
    assert sum(worker.evicted_blocks for worker in result.workers) > 100


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"groups": "window"}, r"\.cache_groups: cache groups are window:TOKENS or state, each"),
        ({"host_kv_tokens": 6_400}, r"\.host_kv_tokens: must be 0 with cache_groups, which stay"),
        ({"kv_tokens": 100}, " .*: windows and states of one request take 9 blocks of 16 tokens"),
    ],
)
def test_the_error_for_impossible_cache_groups_names_the_field(
    more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ReplayError, match=rf"groups\[0\]{said}"):
        run([job(0, 100, 1)], hybrid(**more))


@settings(max_examples=examples(25), deadline=None)
@given(
    requests=requests_up_to(1200),
    groups=st.sampled_from(GROUPS),
    loss=st.sampled_from((0.0, 0.3)),
)
def test_python_and_native_workers_give_the_same_result(
    requests: Any, groups: str, loss: float
) -> None:
    setup = hybrid(count=2, groups=groups, kv_tokens=1_600, world=World(event_loss=loss))
    assert_twins_agree(requests, setup)

"""Tests of published rules with the real decision core: each leaves a worker with a much-used
prefix at the load that it states.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.policies.pool import Job, Outcome, Pool, conversations, shared_prompt

PROFILE = "qwen3-32b-h100-tp2"
SHARED = 6_000  # of 6,704 tokens


def run(policy: str, jobs: list[Job], seed: int = 1) -> Outcome:
    return Pool(policy, PROFILE, 8, 269_000, 16, seed).run(jobs)


def burst(siblings: int, session: str | None = None) -> list[Job]:
    """Return one request that fills a worker's cache, and `siblings` requests a minute later that
    share its beginning.
    """
    trunk = np.arange(1, SHARED // 16 + 1, dtype=np.uint64)
    jobs = []
    for number in range(siblings + 1):
        own = np.arange(44, dtype=np.uint64) + np.uint64(10**6 * (number + 1))
        time_s = 0.0 if number == 0 else 60.0 + 1e-7 * number
        jobs.append(Job(time_s, np.concatenate((trunk, own)), SHARED + 704, 2, session))
    return jobs


@pytest.mark.parametrize(
    ("policy", "depth"),
    [
        ("trt_llm", 58),  # 64 * 6,000 / 6,704 = 57.3
        ("cache_aware", 65),
        ("dynamo_two_tier", 33),
        ("ray_prefix", 11),
        ("aibrix", 1),
        ("aibrix?deviations=3", 8),
        ("prefix_hash", 1),  # 1.25 times the mean of eight is below one
        ("chwbl", 1),
    ],
)
def test_a_burst_stays_at_the_cached_worker_up_to_the_spill_depth(policy, depth):
    assert sorted(run(policy, burst(depth)).requests) == [0] * 7 + [depth + 1]
    spilled = sorted(run(policy, burst(depth + 1)).requests)
    assert spilled[-1] == depth + 1
    assert sum(spilled[:-1]) == 1


@pytest.mark.parametrize(
    "policy",
    [
        *("kv_prefix", "llm_d", "llm_d?min_max=true"),
        *("llm_d_sticky", "trt_llm_conversation"),
    ],
)
def test_policies_without_a_spill_depth_never_leave_the_cached_worker(policy):
    assert max(run(policy, burst(200)).requests) == 201


@pytest.mark.parametrize("policy", ["session_sticky", "trt_llm_conversation"])
def test_session_policies_never_move_a_session(policy):
    assert max(run(policy, burst(100, "one session")).requests) == 101
    assert max(run(policy, burst(100, None)).requests) <= (20 if "sticky" in policy else 101)


@pytest.mark.parametrize(
    "policy",
    [
        *("cache_aware", "least_load", "prefix_hash", "ray_prefix", "least_tokens"),
        *("session_sticky", "trt_llm_conversation?skip_tokens=6000"),
    ],
)
def test_no_worker_is_idle_under_a_popular_prompt(policy):
    outcome = run(policy, shared_prompt(300, 60.0, SHARED, 700, 24, 1))
    assert min(outcome.requests) >= 20, outcome.requests
    assert outcome.hit_rate >= 0.85


@pytest.mark.parametrize("policy", ["session_sticky", "trt_llm_conversation"])
def test_policies_with_affinity_find_the_cache_of_sessions_again(policy):
    jobs = conversations(60, 6.0, 2_560, 6, 400, 60, 2)
    blind, sticky = (run(name, jobs, 2) for name in ("least_requests", policy))
    assert sticky.hit_rate >= blind.hit_rate + 0.12
    assert sticky.skew <= 1.5, sticky.requests

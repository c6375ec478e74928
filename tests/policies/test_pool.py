"""Tests of policies in a pool of eight workers: an overloaded worker, what prevents it, and
requests that follow the cache.
"""

from __future__ import annotations

import pytest

from tests.policies.pool import Outcome, Pool, conversations, shared_prompt

PROFILES = ["qwen3-32b-h100-tp2", "llama-3.1-8b-h100"]
seeds = pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
profiles = pytest.mark.parametrize("profile", PROFILES)


def run(policy: str, profile: str, jobs: list, seed: int, slow: tuple[int, ...] = ()) -> Outcome:
    return Pool(policy, profile, 8, 269_000, 16, seed, slow).run(jobs)


@seeds
@profiles
def test_hybrid_spreads_a_popular_prompt_and_is_as_fast_as_round_robin(profile, seed):
    jobs = shared_prompt(500, 60.0, 6_000, 700, 24, seed)
    blind, hybrid = (run(policy, profile, jobs, seed) for policy in ("round_robin", "hybrid"))
    assert hybrid.skew <= 1.25, hybrid.requests
    assert hybrid.hit_rate >= 0.80
    assert hybrid.ttft_s.mean() <= 1.15 * blind.ttft_s.mean()


def test_kv_prefix_sends_a_popular_prompt_to_one_worker():
    outcome = run("kv_prefix", PROFILES[0], shared_prompt(200, 60.0, 6_000, 700, 24, 1), 1)
    assert max(outcome.requests) == 200


def test_kv_load_spreads_a_popular_prompt_evenly():
    outcome = run("kv_load", PROFILES[0], shared_prompt(500, 60.0, 6_000, 700, 24, 1), 1)
    assert outcome.skew <= 1.5, outcome.requests


@seeds
@profiles
def test_hybrid_keeps_conversations_at_the_worker_with_their_cache(profile, seed):
    jobs = conversations(80, 4.0, 2_560, 7, 400, 100, seed)
    blind, hybrid = (run(policy, profile, jobs, seed) for policy in ("round_robin", "hybrid"))
    assert hybrid.hit_rate >= blind.hit_rate + 0.15
    assert hybrid.ttft_s.mean() <= 0.75 * blind.ttft_s.mean()


@seeds
def test_hybrid_spreads_load_evenly_near_saturation(seed):
    jobs = shared_prompt(800, 140.0, 6_000, 700, 24, seed)
    blind, hybrid = (run(policy, PROFILES[0], jobs, seed) for policy in ("round_robin", "hybrid"))
    assert hybrid.skew <= 1.1, hybrid.requests
    assert hybrid.ttft_s.mean() <= 1.25 * blind.ttft_s.mean()


@seeds
def test_hybrid_gives_slow_workers_fewer_requests(seed):
    jobs = shared_prompt(500, 100.0, 6_000, 700, 24, seed)
    slow = (0, 5)
    blind, hybrid = (
        run(policy, PROFILES[0], jobs, seed, slow) for policy in ("round_robin", "hybrid")
    )
    assert max(hybrid.requests[worker] for worker in slow) < 500 / 8
    assert hybrid.ttft_s.mean() <= 0.7 * blind.ttft_s.mean()

"""Tests that shortened workloads show the shape of published results; docs/notes/validation.md has
the full ones.

The bounds are wide: they check what a published figure says about a rule, not its digits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup
from simulator.report.row import ReplayRow, summarize
from simulator.traces.spec import WorkloadSpec

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"
CONVERSATION = TRACES / "mooncake_conversation.jsonl.gz"
SURROGATE = TRACES / "toolagent_surrogate.jsonl.gz"
AZURE = TRACES / "azure_2023_conv.csv.gz"
QWEN, LLAMA = "qwen3-32b-h100-tp2", "llama-3.1-8b-h100"


@cache
def row(
    source: str,
    policy: str,
    profile: str = QWEN,
    kv_tokens: int | None = None,
    block_size: int | None = 16,
    requests: int | None = None,
    prefix_wait_tokens: int | None = 0,  # the published engines do not wait
    spread_s: float = 0.0,
    workers: int = 8,
) -> ReplayRow:
    """Replay `source` under `policy` with seed 0; return the row of the report."""
    group = WorkerGroup(workers, profile, kv_tokens, prefix_wait_tokens=prefix_wait_tokens)
    spec = WorkloadSpec(source, requests=requests, spread_s=spread_s)
    return summarize(replay(Setup(spec, policy, (group,), block_size=block_size)))


# --- llm-d's 150 x 5 prompts, 73 % of the pool's cache: every prompt once, then a short ladder ----
# The test has half of the workers, of the groups of prompts and of the requests per second.

PARTS = 2
LADDER = (
    "gen:inference_perf?groups=75&prompts=5&system=6000&question=1200&output=1000&warm_ups=0"
    "&pause_s=300&stages=7.5:50,7.5:20,10:38,20:20"
)
LADDER_KV = 307_328


def ladder(policy: str) -> dict[str, list[float]]:
    """Return the p90 of TTFT in s and the output tokens per second at 15 (warm), 20 and 40 requests
    per second, as for eight workers.
    """
    stages = row(LADDER, policy, kv_tokens=LADDER_KV, workers=8 // PARTS).stages[1:]
    assert [stage.rate_per_s * PARTS for stage in stages] == [15.0, 20.0, 40.0]
    assert all(stage.completed == stage.requests for stage in stages)
    return {
        "ttft_p90_s": [(stage.ttft_ms.p90 or 0.0) / 1000 for stage in stages],
        "output_per_s": [stage.output_tokens_per_s or 0.0 for stage in stages],
    }


def test_cache_blind_rules_saturate_between_15_and_20_requests_a_second() -> None:
    at_15, at_20, at_40 = ladder("round_robin")["ttft_p90_s"]
    assert at_15 < 5.0
    assert at_20 > 10.0
    assert at_40 > 30.0


def test_exact_prefix_routing_keeps_ttft_low_at_all_rates() -> None:
    assert max(ladder("llm_d")["ttft_p90_s"]) < 1.0


def test_exact_prefix_routing_gives_about_twice_the_output() -> None:
    exact, blind = (ladder(policy)["output_per_s"][-1] for policy in ("llm_d", "round_robin"))
    assert 1.6 < exact / blind < 2.6


# --- SGLang's burst of 64 x 16 prompts on eight workers -------------------------------------------

BURST = "gen:sglang"
SHORT_OF_KV = 45_000


def hits(policy: str, kv_tokens: int | None = None, source: str = BURST) -> float:
    found = row(source, policy, LLAMA, kv_tokens).hit_rate_tokens
    assert found is not None
    return found


def test_a_burst_under_affinity_has_the_published_hit_rate() -> None:
    assert 0.70 <= hits("hybrid") <= 0.85


def test_a_burst_under_round_robin_has_the_computed_hit_rate() -> None:
    """With room for everything, each worker computes each group that it meets once, so the hit rate
    follows from arithmetic.
    """
    groups, prompts, workers = 64, 16, 8
    computed = groups * (1 - (1 - 1 / workers) ** prompts)  # groups a worker meets at least once
    share = (1 - computed / (groups * prompts / workers)) * 2048 / 2176
    assert share == pytest.approx(0.526, abs=0.001)
    assert share - 0.05 < hits("round_robin") < share


def test_a_burst_on_small_caches_has_both_published_hit_rates() -> None:
    blind, aware = (row(BURST, p, LLAMA, SHORT_OF_KV) for p in ("round_robin", "hybrid"))
    assert blind.hit_rate_tokens is not None
    assert aware.hit_rate_tokens is not None
    assert 0.15 <= blind.hit_rate_tokens <= 0.30
    assert 0.70 <= aware.hit_rate_tokens <= 0.85
    ratio = (aware.output_tokens_per_s or 0.0) / (blind.output_tokens_per_s or 1.0)
    assert 1.5 < ratio < 2.4


def test_prompts_of_a_group_in_the_same_step_do_not_hit_each_other() -> None:
    """Prompts of a group that are computed together find nothing: in order, they reach one worker
    together and are in one step, so neither finds the other's blocks.
    """
    assert hits("round_robin", source="gen:sglang?ordered=true") < 0.15


# --- what must go wrong -------------------------------------------------------------------------


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the Mooncake conversation is not here")
def test_greedy_prefix_affinity_sends_a_whole_trace_to_one_worker() -> None:
    """All requests have the same first block, so the worker that answers the first request gets all
    others.
    """
    found = row(str(CONVERSATION), "kv_prefix", block_size=None, requests=600)
    assert found.load_skew_requests == 8.0
    even = row(str(CONVERSATION), "round_robin", block_size=None, requests=600)
    assert (found.ttft_ms.mean or 0.0) > 20 * (even.ttft_ms.mean or 0.0)


@pytest.mark.skipif(not AZURE.exists(), reason="the Azure trace is not here")
def test_affinity_costs_no_time_without_shared_prefixes() -> None:
    blind, affine = ("round_robin", "least_requests"), ("llm_d", "hybrid")
    times = {
        policy: row(str(AZURE), policy, block_size=128, requests=500).e2e_ms.mean or 0.0
        for policy in (*blind, *affine)
    }
    best = min(times[policy] for policy in blind)
    assert times["llm_d"] < 1.02 * best
    assert times["hybrid"] < 1.02 * best


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(not SURROGATE.exists(), reason="the tool-and-agent surrogate is not here")
def test_the_substitute_trace_has_the_published_hit_rates() -> None:
    """On the substitute trace, hit rates are those that DynoSim published for the original, and
    times improve as AKS measured, with 1 M tokens of KV a worker.
    """
    options = {"kv_tokens": 1_000_000, "block_size": None, "spread_s": 3.0}
    blind, aware = (row(str(SURROGATE), p, **options) for p in ("round_robin", "hybrid"))
    assert blind.hit_rate_tokens is not None
    assert 0.37 <= blind.hit_rate_tokens <= 0.40
    assert (aware.hit_rate_tokens or 0.0) >= 0.44
    for figure in ("mean", "p99"):
        assert (getattr(aware.ttft_ms, figure) or 0.0) < (getattr(blind.ttft_ms, figure) or 0.0)
        assert (getattr(aware.e2e_ms, figure) or 0.0) < (getattr(blind.e2e_ms, figure) or 0.0)

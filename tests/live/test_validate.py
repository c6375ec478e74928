"""Tests that a live run with real programs agrees with its simulated replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.calibrate.validate import LATE_MS, MEAN_TTFT, Validation, same_ranking, validate
from simulator.live.load import opened
from simulator.live.outcome import Outcome
from simulator.live.stack import StackSettings
from simulator.traces.spec import WorkloadSpec

CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
# 60 requests in 5 s; a group's prompts reuse 2,560 of 2,816 tokens.
SHARED = "gen:sglang?groups=5&prompts=12&system=2560&question=256&output=16&rate=12"


async def validated(
    spec: WorkloadSpec, policies: tuple[str, ...], stack: StackSettings, log_dir: Path
) -> list[Validation]:
    seen: list[Outcome] = []
    started: list[str] = []
    workload = opened(spec, "a workload", spec.source)
    found = await validate(workload, spec, policies, stack, log_dir, started.append, seen.append)
    assert started == list(policies)
    assert len(seen) == len(policies) * len(workload.jobs)
    for one in found:
        figures = {metric.name: metric for metric in one.metrics}
        assert figures["completed"].live == figures["completed"].simulated == len(workload.jobs)
        assert one.placements.requests == len(workload.jobs)
    return found


@pytest.mark.alone
async def test_a_short_live_run_matches_its_replay(tmp_path: Path) -> None:
    """A short live run agrees with its replay, with wide tolerances because other tests run at the
    same time.
    """
    stack = StackSettings("round_robin", workers=2, profile="llama-3.1-8b-h100")
    for attempt in range(3):
        turns, hybrid = await validated(
            WorkloadSpec(SHARED), ("round_robin", "hybrid"), stack, tmp_path / str(attempt)
        )
        # A client short of CPU may send two requests that are due together in the wrong order.
        if turns.placements.same_worker == 1.0 or (turns.late_p99_ms or 0.0) <= LATE_MS:
            break
    # With round robin nothing depends on times, so every request must be where the replay has it.
    assert turns.placements.same_worker == 1.0
    assert turns.placements.same_hit > 0.7
    for one in (turns, hybrid):
        figures = {metric.name: metric for metric in one.metrics}
        assert abs(figures["hit rate"].difference or 0.0) < 15.0
        assert (figures["hit rate"].live or 0.0) > 0.5
        # A model's time is a lower bound: no machine answers before its steps end.
        assert (figures[MEAN_TTFT].difference or 0.0) < 15.0


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not CONVERSATION.exists(), reason="the Mooncake conversation is not here")
async def test_a_replay_of_a_real_trace_is_within_two_points_and_fifteen_per_cent(
    tmp_path: Path,
) -> None:
    spec = WorkloadSpec(str(CONVERSATION), seconds=100, spread_s=3.0)
    stack = StackSettings("round_robin", workers=8)
    found = await validated(spec, ("round_robin", "hybrid"), stack, tmp_path)
    assert found[0].placements.same_worker == 1.0
    assert [one.policy for one in found if not one.passed] == []
    assert same_ranking(found)

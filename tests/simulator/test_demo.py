"""The demo's plan: its workloads, and that a run on a slow machine is repeated slower."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from simulator.live import demo
from simulator.live.demo import DemoSettings, acts, run_demo
from simulator.live.load import OnOutcome, Workload
from simulator.live.sample import SAMPLE_PATH
from simulator.live.stack import RunResult, StackSettings
from simulator.traces.job import TraceError
from simulator.traces.open import sessions
from tests.simulator.made_up import run

Calls = list[tuple[str, str, float]]


def test_the_workloads_are_those_promised() -> None:
    shared, conversation, agents = acts(8, 1.0, False, SAMPLE_PATH)
    jobs = shared.workload.jobs
    assert len(jobs) == 500
    assert {job.prompt_tokens for job in jobs} == {6_700}
    assert 500 / shared.workload.span_s == pytest.approx(60, rel=0.15)
    assert shared.policies == ("round_robin", "kv_prefix", "kv_load", "hybrid")
    assert conversation.policies == ("round_robin", "hybrid")
    assert conversation.workload.name == "conversation"
    assert len(conversation.workload.jobs) > 300
    assert agents.policies == ("kv_prefix", "hybrid", "warmset")
    quick = acts(8, 0.5, True, SAMPLE_PATH)
    assert len(quick[0].workload.jobs) == 100
    for one, whole in zip(quick, acts(8, 1.0, False, SAMPLE_PATH), strict=True):
        assert one.settings.speed == whole.settings.speed / 2
        assert one.workload.span_s == pytest.approx(whole.workload.span_s / 5, rel=0.2)


def test_the_agents_do_not_fit_into_the_caches() -> None:
    act = acts(8, 1.0, False, SAMPLE_PATH)[2]
    room = act.settings.workers * ((act.settings.kv_tokens or 0) - 10_000)
    talks = [turns for _, turns in sessions(iter(act.workload.jobs))]
    begun = [turns for turns in talks if turns[0].at_ns == 0]
    assert len(begun) == 24
    # Those who begin at once fill the caches by their last turns; more come all the time.
    assert sum(turns[-1].prompt_tokens - 10_000 for turns in begun) > 0.9 * room
    assert act.workload.ends_s == 100.0
    ahead = [turns for turns in talks if turns[0].at_ns < 100e9]
    assert len(ahead) == pytest.approx(24 + 30, rel=0.3)
    assert len(talks) > len(ahead)  # the end cuts them off, not their number


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl"):
        acts(8, 1.0, False, tmp_path / "none.jsonl")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Runs are made up; those of kv_prefix overrun above speed 0.5."""
    seen: Calls = []

    async def made_up(
        workload: Workload, settings: StackSettings, log_dir: Path, on_outcome: OnOutcome
    ) -> RunResult:
        seen.append((workload.name, settings.policy, settings.speed))
        slow = settings.policy == "kv_prefix" and settings.speed > 0.5
        result = run(settings.policy, workload.name, requests=40)
        row = msgspec.structs.replace(
            result.row, speed=settings.speed, overrun_steps_share=0.05 if slow else 0.001
        )
        return replace(result, row=row)

    monkeypatch.setattr(demo, "run_scenario", made_up)
    return seen


async def test_an_overrun_is_repeated_slower_and_stays_slower(calls: Calls, tmp_path: Path) -> None:
    text = io.StringIO()
    settings = DemoSettings(out=tmp_path, trace=SAMPLE_PATH)
    result = await run_demo(settings, Console(file=text, width=200))
    assert calls[:5] == [
        ("shared_prompt", "round_robin", 1.0),
        ("shared_prompt", "kv_prefix", 1.0),
        ("shared_prompt", "kv_prefix", 0.6),
        ("shared_prompt", "kv_prefix", 0.36),
        ("shared_prompt", "kv_load", 0.36),
    ]
    assert "5.0% of steps overran" in text.getvalue()
    assert result.sound
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert [(row["workload"], row["policy"]) for row in report["results"]] == [
        *(("shared_prompt", p) for p in ("round_robin", "kv_prefix", "kv_load", "hybrid")),
        *(("conversation", p) for p in ("round_robin", "hybrid")),
        *(("agents", p) for p in ("kv_prefix", "hybrid", "warmset")),
    ]
    assert "<html" in (tmp_path / "report.html").read_text()


async def test_what_did_not_return_to_zero_is_shown_and_not_sound(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = demo.run_scenario

    async def leaking(*arguments: object) -> RunResult:
        result = await made_up(*arguments)  # type: ignore[arg-type]
        return replace(result, leftovers=("router: worker 0 inflight_requests = 1",))

    monkeypatch.setattr(demo, "run_scenario", leaking)
    text = io.StringIO()
    settings = DemoSettings(out=tmp_path, trace=SAMPLE_PATH)
    result = await run_demo(settings, Console(file=text, width=200))
    assert not result.sound
    assert "worker 0 inflight_requests = 1" in text.getvalue()

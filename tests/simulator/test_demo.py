"""The demo's plan: its workloads, and that a run on a slow machine is repeated slower."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from simulator import demo
from simulator.demo import DemoSettings, demo_parts, run_demo
from simulator.load import OnOutcome
from simulator.sample import SAMPLE_PATH
from simulator.scenario import RunResult
from simulator.stack import StackSettings
from simulator.traces.errors import TraceError
from simulator.workload import Workload
from tests.simulator.made_up import run

Calls = list[tuple[str, str, float]]


def test_the_workloads_are_those_promised() -> None:
    shared, conversation = demo_parts(DemoSettings(trace=SAMPLE_PATH))
    jobs = shared.workload.jobs
    assert len(jobs) == 500
    assert {job.prompt_tokens for job in jobs} == {6_700}
    assert 500 / shared.workload.span_s == pytest.approx(60, rel=0.15)
    assert shared.policies == ("round_robin", "kv_prefix", "kv_load", "hybrid")
    assert conversation.policies == ("round_robin", "hybrid")
    assert conversation.workload.name == "conversation"
    assert len(conversation.workload.jobs) > 300
    quick = demo_parts(DemoSettings(trace=SAMPLE_PATH, quick=True, speed=0.5))
    assert len(quick[0].workload.jobs) == 100
    assert quick[0].settings.speed == shared.settings.speed / 2


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl"):
        demo_parts(DemoSettings(trace=tmp_path / "none.jsonl"))


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

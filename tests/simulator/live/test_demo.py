"""Tests of the demo: what it compares, that it does less on a busy machine and says so, and that it
ends.
"""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from simulator.live import demo
from simulator.live.demo import acts, as_run, claims, run_demo, split_front
from simulator.live.load import OnOutcome, Workload
from simulator.live.stack import RunResult, StackSettings
from simulator.replay.run import replay
from simulator.report.row import summarize
from simulator.traces.job import TraceError
from simulator.workloads.open import open_jobs, sessions
from tests.simulator.made_up import run

OURS = ("hybrid", "warmset")
Calls = list[tuple[str, str, int, int]]  # workload, policy, workers, requests


def test_the_demos_agents_exceed_the_caches() -> None:
    act = acts()[2]
    room = act.workers * ((act.kv_tokens or 0) - 10_000)
    talks = [turns for _, turns in sessions(open_jobs(act.spec, demo.SEED).jobs)]
    begun = [turns for turns in talks if turns[0].at_ns == 0]
    assert len(begun) == 24
    # Sessions that begin at once fill the caches by their last turns, and others keep coming.
    assert sum(turns[-1].prompt_tokens - 10_000 for turns in begun) > 0.9 * room


def test_a_replay_shown_as_a_run_keeps_its_figures() -> None:
    part = acts()[0]
    part = replace(part, spec=msgspec.structs.replace(part.spec, requests=60))
    result = replay(part.setup("hybrid"))
    row, found = summarize(result), as_run(result, part)
    assert (found.row.policy, found.row.workload) == ("hybrid", "shared_prompt")
    assert found.row.requests == len(found.outcomes) == 60
    assert found.row.requests_per_worker == row.requests_per_worker
    assert found.row.ttft_ms.mean == pytest.approx(row.ttft_ms.mean, abs=0.01)
    assert found.row.ttft_ms.p99 == pytest.approx(row.ttft_ms.p99, abs=0.01)
    assert found.row.hit_rate_tokens == pytest.approx(row.hit_rate_tokens, abs=1e-4)
    assert found.row.overrun_steps_share is None  # virtual time has no late steps
    assert found.row.busy_share_per_worker == pytest.approx(row.busy_share, abs=0.02)
    assert found.samples is result.samples


def test_the_demo_report_shows_whether_disaggregation_pays() -> None:
    section = split_front(acts()[1].spec)
    (picture,) = section.pictures
    assert picture.svg.count("<path") > 10
    assert "prefill + decode gives 1." in picture.caption, "long prompts, short steps"
    one = msgspec.structs.replace(acts()[1].spec, requests=1)
    assert split_front(one).pictures


async def test_the_error_for_a_missing_trace_names_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl"):
        await run_demo(tmp_path, Console(file=io.StringIO()), trace=tmp_path / "none.jsonl")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace live and simulated runs by invented results; return the list of the live runs that
    were requested.
    """
    seen: Calls = []

    async def made_up(
        workload: Workload, settings: StackSettings, log_dir: Path, on_outcome: OnOutcome
    ) -> RunResult:
        await asyncio.sleep(0.01)
        seen.append((workload.name, settings.policy, settings.workers, len(workload.jobs)))
        return run(settings.policy, workload.name, requests=40)

    monkeypatch.setattr(demo, "run_scenario", made_up)
    monkeypatch.setattr(demo, "replay", lambda setup: setup)
    monkeypatch.setattr(
        demo, "as_run", lambda setup, part: run(setup.policy, part.name, requests=40)
    )
    return seen


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the report page, because its pictures take long. The first test of a whole demo
    makes one.
    """
    monkeypatch.setattr(demo, "render_page", lambda *_, **__: "")


async def demonstrated(out: Path, quick: bool = False) -> tuple[demo.DemoRuns, str]:
    text = io.StringIO()
    return await run_demo(out, Console(file=text, width=300), quick), text.getvalue()


async def test_the_demo_reports_every_run_and_its_claims(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "BUSY_SHARE", 0.0)
    found, text = await demonstrated(tmp_path)
    assert found.sound
    assert not found.notes
    assert calls == [("live", policy, 8, 500) for policy in ("kv_prefix", "hybrid")]
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert [(row["workload"], row["policy"]) for row in report["results"]] == [
        *(("shared_prompt", p) for p in ("round_robin", "kv_prefix", "kv_load", *OURS)),
        *(("conversation", p) for p in ("round_robin", *OURS)),
        *(("agents", p) for p in OURS),
        *(("live", p) for p in ("kv_prefix", "hybrid")),
    ]
    assert [claim["text"] for claim in report["claims"]] == [
        claim.text for claim in claims(found.rows)
    ]
    assert all(claim["text"][:40] in text for claim in report["claims"])
    assert "<html" in (tmp_path / "report.html").read_text()


async def test_the_demo_runs_less_on_a_busy_machine_and_reports_that(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "BUSY_SHARE", float("inf"))
    monkeypatch.setattr(demo, "LAST_REPLAY_S", -1.0)
    _, text = await demonstrated(tmp_path)
    assert calls == [("live", policy, 4, 240) for policy in ("kv_prefix", "hybrid")]
    assert text.count("was left out") == 10
    assert "live, 240 requests on 4 workers instead of 500 on 8" in text
    assert "was left out" in (tmp_path / "report.html").read_text()


async def test_the_demo_ends_in_time_on_a_slow_machine(
    calls: Calls, unpainted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "LIMIT_S", -1.0)
    found, text = await demonstrated(tmp_path, quick=True)
    assert "the live part was ended early" in text
    assert len(found.runs) == 10
    assert len(json.loads((tmp_path / "report.json").read_bytes())["results"]) == 10


async def test_leftovers_after_a_run_are_shown_and_make_the_demo_unsound(
    calls: Calls, unpainted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = demo.run_scenario

    async def leaking(*arguments: object) -> RunResult:
        result = await made_up(*arguments)  # type: ignore[arg-type]
        return replace(result, leftovers=("router: worker 0 inflight_requests = 1",))

    monkeypatch.setattr(demo, "run_scenario", leaking)
    found, text = await demonstrated(tmp_path)
    assert not found.sound
    assert "worker 0 inflight_requests = 1" in text

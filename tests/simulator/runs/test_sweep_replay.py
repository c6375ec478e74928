"""Tests of sweeps and plans with real, small replays."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from random import Random

import msgspec
import pytest
from rich.console import Console

from simulator.replay.setup import Setup, WorkerGroup
from simulator.runs.plan import PlanRequest, Targets
from simulator.runs.runs import RunOptions, sweep
from simulator.runs.sheet import read_sheet
from simulator.runs.sweep import SweepReport, run_plan, run_sweep
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs

PROFILE = "qwen3-32b-h100-tp2"
REQUESTS = 150


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace in the Mooncake format whose requests have twelve prefixes; return its path."""
    random = Random(1)
    path = tmp_path / "trace.jsonl"
    lines = []
    for serial in range(REQUESTS):
        group = random.randrange(12)
        ids = [group * 1000 + block for block in range(8)] + [100_000 + serial]
        line = {
            "timestamp": serial * 100,
            "input_length": 9 * 512,
            "output_length": random.randrange(10, 60),
            "hash_ids": ids,
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    assert len(list(open_jobs(WorkloadSpec(str(path))).jobs)) == REQUESTS
    return path


@pytest.fixture
def sheet(tmp_path: Path, trace: Path) -> Path:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"workload: {{source: {trace}, rate_per_s: 10, requests: 75}}\n"
        f"fleet: {{profile: {PROFILE}, count: 2}}\n"
        "grid:\n"
        "  policies: [round_robin, {hybrid: {load_factor: [0.5, 2]}}]\n"
        "  workers: [2, 3]\n"
        "  seeds: [1, 2]\n"
    )
    return file


def test_hashes_do_not_depend_on_the_number_of_processes(tmp_path: Path, sheet: Path) -> None:
    hashes = []
    for jobs in (1, 2):
        options = RunOptions(tmp_path / f"{jobs}.jsonl", jobs)
        outcomes = sweep(read_sheet(sheet), options, Console(file=io.StringIO()))
        assert [outcome.error for outcome in outcomes] == [None] * 12
        hashes.append([outcome.row.report_hash for outcome in outcomes if outcome.row])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) > 6


def test_the_sweep_command_prints_and_writes_all_results(tmp_path: Path, sheet: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    files = {kind: tmp_path / f"s.{kind}" for kind in ("csv", "json", "html")}
    assert run_sweep(sheet, RunOptions(jobs=2), console, **files)
    first = console.file.getvalue()  # type: ignore[attr-defined]
    assert "12 runs, 2 at a time" in first
    assert "hits" in first
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "s.csv").read_text())))) == 12
    report = msgspec.json.decode((tmp_path / "s.json").read_bytes(), type=SweepReport)
    assert len(report.points) == 6
    assert (tmp_path / "s.html").read_text().count("<img") == 3
    assert run_sweep(sheet, RunOptions(jobs=2), console, **files)
    again = console.file.getvalue()[len(first) :]  # type: ignore[attr-defined]
    assert "0 runs, 2 at a time; 12 more are there already" in again
    assert msgspec.json.decode((tmp_path / "s.json").read_bytes(), type=SweepReport) == report


def test_an_impossible_setup_is_a_failed_run_with_its_reason(tmp_path: Path, sheet: Path) -> None:
    sheet.write_text(sheet.read_text().replace("workers: [2, 3]", "kv_tokens: [1024]"))
    console = Console(file=io.StringIO(), width=200)
    assert not run_sweep(sheet, RunOptions(jobs=1), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "failed round_robin, seed 1: ReplayError: no request can run: the shortest" in text


def test_a_plan_of_real_replays_finds_a_border(tmp_path: Path, trace: Path) -> None:
    base = Setup(
        WorkloadSpec(str(trace), rate_per_s=12.0), "round_robin", (WorkerGroup(1, PROFILE),)
    )
    request = PlanRequest(
        base, ("round_robin", "hybrid"), Targets(ttft_p90_ms=400.0), seeds=(1, 2), most_workers=24
    )
    console = Console(file=io.StringIO(), width=120)
    options = RunOptions(tmp_path / "plan.jsonl", 2)
    assert run_plan(request, options, console, tmp_path / "plan.json")
    answer = json.loads((tmp_path / "plan.json").read_bytes())
    for row in answer["rows"]:
        met = {trial["value"]: trial["met"] for trial in row["trials"]}
        assert met[row["answer"]]
        assert not met[row["answer"] - 1]
    needs = {row["policy"]: row["answer"] for row in answer["rows"]}
    assert needs["hybrid"] < needs["round_robin"]
    assert "Take hybrid on" in console.file.getvalue()  # type: ignore[attr-defined]

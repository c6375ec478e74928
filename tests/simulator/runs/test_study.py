"""Tests of the study's list of sweep files: all can be run, small ones are run, and bad ones are
refused.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from policies import POLICIES
from simulator.runs.study import HERE, StudyPart, read_steps, run_study
from simulator.runs.task import SweepError
from simulator.traces.generators.table import PREFIX, find_generator
from tests.simulator.synthetic import evaluate

TRACES = (
    "mooncake_conversation.jsonl.gz", "toolagent_surrogate.jsonl.gz", "azure_2023_conv.csv.gz",
    "agentic_coding_sessions.jsonl.gz", "agentic_coding_merged.jsonl.gz",
)  # fmt: skip


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Return a folder with empty files of the traces' names; no test reads them."""
    for name in TRACES:
        (tmp_path / name).touch()
    return tmp_path


def test_every_sweep_file_is_listed_and_can_be_run(traces: Path) -> None:
    steps = read_steps(StudyPart(traces, "full"))
    files = {path.stem for path in HERE.glob("*.yaml")} - {"study"}
    assert {step.name for step in steps} == files
    used = set()
    for step in steps:
        for setup in step.setups:
            used.add(setup.policy)
            if setup.workload.source.startswith(PREFIX):
                find_generator(setup.workload.source)
    assert used == set(POLICIES)
    w4b = next(step for step in steps if step.name == "w4b")
    seeds = {setup.seed for setup in w4b.setups if setup.policy == "lmetric"}
    assert seeds == set(range(1, 21))
    assert len(set(w4b.setups)) == len(w4b.setups)


def test_the_studys_default_part_needs_no_traces() -> None:
    steps = read_steps(StudyPart())
    assert [step.name for step in steps] == ["w1", "w2", "w3", "w4a", "w4b"]
    assert {len(step.setups) for step in steps} == {3 * len(POLICIES)}
    only = read_steps(StudyPart(only=("w1",), policies=("hybrid|bounded_load",), alone=True))
    assert {setup.policy for setup in only[0].setups} == {"hybrid|bounded_load"}


def test_the_table_part_has_each_workload_at_four_loads(traces: Path) -> None:
    steps = {step.name: step.setups for step in read_steps(StudyPart(traces, "table"))}
    drawn_often = {f"table_{name}" for name in (
        "agents_48k", "agents_28k", "coding_heavy", "coding_file"
    )}  # fmt: skip
    assert drawn_often < set(steps)
    assert len(steps) == 15
    rules = {"warmset", "lmetric", "lpwl", "llm_d_sticky", "cache_aware"}
    for name, setups in steps.items():
        if name not in drawn_often:
            assert {setup.policy for setup in setups} == rules
            per_rule = len(setups) / len(rules)
            assert all(sum(s.policy == rule for s in setups) == per_rule for rule in rules)
        seeds = set(range(1, 21 if name in drawn_often else 5))
        fleets = {setup.groups for setup in setups}
        for rule in ("warmset", "lmetric"):
            points = [setup for setup in setups if setup.policy == rule]
            assert {setup.seed for setup in points} == seeds, name
            assert len(points) == 4 * len(seeds) * len(fleets), (name, rule)
        assert {setup.router.hold_s for setup in setups} == {300.0}
        for setup in setups:
            drawn = not setup.workload.source.startswith(PREFIX)
            assert bool(setup.workload.resample) == drawn, "a generator draws by itself"
    of_coding = {setup.policy for setup in steps["table_coding_heavy"]}
    assert {"dynamo_subagent_group", "dynamo_load_guard", "smg_expected_wait"} < of_coding


def test_missing_traces_and_unknown_sweeps_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"azure_2023_conv.csv.gz: there is no such trace"):
        read_steps(StudyPart(tmp_path, "full"))
    with pytest.raises(SweepError, match=r"sweeps: unknown 'w5'; valid: w1, w2"):
        read_steps(StudyPart(only=("w5",)))
    for text, said in (
        ("rules: {a: [hybrid]}\nfirst: [{sweep: w1, rules: b, seeds: 1}]\n", "unknown 'b'"),
        ("rules: {a: [hybrid]}\nfirst: [{sweep: w1, rules: a, seeds: 0}]\n", "0 seeds; expected"),
        ("rules: {a: [hybrid]}\nfirst: [{sweep: w1, rule: a}]\n", "study.yaml: Object"),
        ("rules: {a: [hybird]}\nfirst: [{sweep: s, rules: a, seeds: 1}]\n", "s.yaml: .*hybird"),
        ("rules: {a: [hybrid]}\nfirst: [{sweep: t, rules: a, seeds: 1}]\n", "t.yaml"),
    ):
        (tmp_path / "study.yaml").write_text(text)
        (tmp_path / "s.yaml").write_bytes((HERE / "w1.yaml").read_bytes())
        with pytest.raises(SweepError, match=said):
            read_steps(StudyPart(), tmp_path / "study.yaml")


def test_a_study_is_run_resumed_and_compared(tmp_path: Path) -> None:
    console = Console(file=StringIO(), record=True, width=160, force_terminal=False)
    asked = StudyPart(only=("w1", "w4b"), policies=("lmetric", "hybrid"), alone=True)
    assert run_study(asked, tmp_path, "lmetric", console, 1, evaluate)
    assert "6 runs" in console.export_text()
    assert run_study(asked, tmp_path, "lmetric", console, 1, evaluate)
    text = console.export_text()
    assert "0 runs, 1 at a time; 6 more are there already" in text
    assert "w4b: 3 seeds; ratios to lmetric" in text
    report = msgspec.json.decode((tmp_path / "study.json").read_bytes())
    assert [scene["name"] for scene in report["scenes"]] == ["w1", "w4b"]
    assert (tmp_path / "study.html").exists()
    assert "`hybrid`" in (tmp_path / "study.md").read_text()


def test_resamples_cover_every_sweep_and_have_their_own_folder(
    traces: Path, tmp_path: Path
) -> None:
    listed = read_steps(StudyPart(traces, "full"))
    asked = StudyPart(traces, "full", resamples=4)
    for step, before in zip(read_steps(asked), listed, strict=True):
        assert {setup.seed for setup in step.setups} == {1, 2, 3, 4}, "every rule, as often"
        assert {s.policy for s in step.setups} == {s.policy for s in before.setups}
        for setup in step.setups:
            drawn = not setup.workload.source.startswith(PREFIX)
            assert bool(setup.workload.resample) == drawn, "a generator draws by itself"
    console = Console(file=StringIO(), record=True, width=160, force_terminal=False)
    asked = StudyPart(only=("w1",), policies=("lmetric", "hybrid"), alone=True, resamples=4)
    assert run_study(asked, tmp_path / "out", "lmetric", console, 1, evaluate)
    assert "w1: 4 seeds; ratios to lmetric" in console.export_text()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["draws"]


def test_a_quick_study_replays(tmp_path: Path) -> None:
    console = Console(file=StringIO(), record=True, width=160, force_terminal=False)
    asked = StudyPart(only=("w3",), quick=True)
    assert run_study(asked, tmp_path, "lmetric", console, 1)
    report = msgspec.json.decode((tmp_path / "quick" / "study.json").read_bytes())
    rules = {rule["policy"]: rule for rule in report["scenes"][0]["rules"]}
    assert set(rules) == {"warmset", "round_robin"}
    assert all(rule["lost_share"] == 0 for rule in rules.values())

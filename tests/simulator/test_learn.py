"""Learning: a run that goes on where it was, a tiny real one, what cannot run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from policies.load import load
from policies.published.choice_features import FEATURES
from simulator.runs.learn import HALVES, LMETRIC, LearnCommand, read_lessons, run_learn
from simulator.runs.task import SweepError
from tests.simulator import bowl
from tests.simulator.cli_support import Run, run

__all__ = ["run"]
ROOT = Path(__file__).resolve().parents[2]
LESSONS = """\
train:
  - {name: a, workload: {source: "gen:agentic?sessions=8"}, seeds: [1, 2],
     fleet: {profile: llama-3.1-8b-h100, count: 3}, closed_loop: true}
  - {name: b, workload: {source: "gen:tenants?sessions=8"}, seeds: [1],
     fleet: {profile: llama-3.1-8b-h100, count: 3}}
held_out:
  - {name: b, workload: {source: "gen:tenants?sessions=8"}, seeds: [11],
     fleet: {profile: llama-3.1-8b-h100, count: 3}}
"""


def silent() -> Console:
    return Console(file=io.StringIO(), width=160)


def command(folder: Path, generations: int = 3, jobs: int = 1, out: str = "o") -> LearnCommand:
    lessons = folder / "lessons.yaml"
    lessons.write_text(LESSONS)
    return LearnCommand(
        "a test",
        folder / out,
        lessons,
        generations=generations,
        population=6,
        sigma=0.05,
        jobs=jobs,
    )


# --- a run --------------------------------------------------------------------------------------


def test_it_finds_the_bottom_and_says_where_it_comes_from(tmp_path: Path) -> None:
    asked = command(tmp_path, generations=25)
    when = datetime(2026, 5, 4, 3, 2, tzinfo=UTC)
    assert run_learn(asked, silent(), bowl.evaluate, lambda: when)
    told = json.loads(asked.out.read_text())
    found = told["found"]
    # 22 coefficients, each 0.1 off at the start: 0.22 off, twice by two logarithms.
    assert found["score_train"] < -0.2
    assert found["score_held_out"] == pytest.approx(found["score_train"], abs=1e-4)
    assert (found["date"], found["command"]) == ("2026-05-04 03:02", "a test")
    assert found["replays"] == 25 * 6 * 3
    assert [(one["name"], one["part"], one["seeds"]) for one in found["lessons"]] == [
        ("a", "train", [1, 2]),
        ("b", "train", [1]),
        ("b", "held_out", [11]),
    ]
    assert load(told["policy"]).params["theta"].split(",") == [
        str(told["theta"][name]) for name in FEATURES
    ]


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    straight = command(tmp_path, generations=5, jobs=2, out="straight")
    run_learn(straight, silent(), bowl.evaluate)
    run_learn(command(tmp_path, generations=2), silent(), bowl.evaluate)
    resumed = command(tmp_path, generations=5)
    state = tmp_path / "o.state.jsonl"
    state.write_bytes(state.read_bytes()[:-7])  # torn within the second generation
    run_learn(resumed, silent(), bowl.evaluate)
    one, other = (json.loads(c.out.read_text()) for c in (straight, resumed))
    assert one["theta"] == other["theta"]
    assert one["found"]["score_train"] == other["found"]["score_train"] < 0
    states = [(tmp_path / f"{name}.state.jsonl").read_text() for name in ("o", "straight")]
    assert states[0] == states[1]


LEARNER = """
import sys
from pathlib import Path
from rich.console import Console
from simulator.runs.learn import LearnCommand, run_learn
from tests.simulator import bowl

if __name__ == "__main__":
    lessons, out = map(Path, sys.argv[1:])
    asked = LearnCommand("a test", out, lessons, generations=100_000, population=6, jobs=2)
    try:
        run_learn(asked, Console(width=200), bowl.evaluate)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.live
def test_ctrl_c_leaves_whole_generations(tmp_path: Path) -> None:
    script, lessons = tmp_path / "learner.py", tmp_path / "lessons.yaml"
    script.write_text(LEARNER)
    lessons.write_text(LESSONS)
    program = subprocess.Popen(
        [sys.executable, "-u", str(script), str(lessons), str(tmp_path / "o")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    assert any(line.startswith("generation 2 ") for line in program.stdout)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert "Traceback" not in errors
    head, *lines = (tmp_path / "o.state.jsonl").read_text().splitlines()
    assert json.loads(head)["format"] == "warmroute-learn"
    assert len(lines) >= 2
    assert all(len(json.loads(line)["scores"]) == 6 for line in lines)
    assert not (tmp_path / "o").exists()


def test_where_nothing_is_better_it_stays_with_the_start(tmp_path: Path) -> None:
    asked = command(tmp_path, generations=1)
    assert not run_learn(asked, silent(), bowl.evaluate_never)
    told = json.loads(asked.out.read_text())
    assert list(told["theta"].values()) == list(LMETRIC)
    assert told["found"]["score_train"] == 0.0


def test_a_tiny_real_run_by_the_command_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(LESSONS)
    out = tmp_path / "mine.json"
    asked = ("learn", tmp_path / "mine.yaml", "--out", out, "--generations", "2")
    said = run(*asked, "--population", "4", "--jobs", "1")
    assert said.status in (0, 1), said.err  # 1: nothing better was found
    assert "generation 2 of 2" in said.out
    told = json.loads(out.read_text())
    assert told["found"]["score_train"] <= 0.0
    assert load(told["policy"]).name == "learned"
    first = out.read_bytes()
    again = run(*asked, "--population", "4", "--jobs", "1")
    assert again.status == said.status
    assert "2 are there already" in again.out
    assert json.loads(out.read_bytes())["theta"] == json.loads(first)["theta"]
    assert "of other lessons" in run(*asked, "--population", "5").err


# --- what cannot run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a list train"),
        ("train: []", "a list train"),
        ("train: {a: 1}", "must be a list"),
        ("trian: [1]\ntrain: [{name: a}]", "did you mean train"),
        ("train: [{workload: {source: x}}]", r"train\[0\]: must be a mapping with name"),
        ("train: [{name: a}]", r"train\[0\]: workload: is missing"),
        (LESSONS.replace("name: b", "name: a", 1), "two lessons have one name"),
        (LESSONS.replace("seeds: [11]", "seeds: eleven"), r"held_out\[0\]: grid.seeds"),
        (LESSONS.replace("count: 3", "counts: 3"), "counts"),
    ],
)
def test_wrong_lessons_are_named(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "lessons.yaml"
    path.write_text(text)
    with pytest.raises(SweepError, match=why):
        read_lessons(path, Path())


def test_a_trace_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    said = run("learn", "--traces", tmp_path, "--out", tmp_path / "o")
    assert said.status == 2
    assert str(tmp_path / "mooncake_conversation.jsonl.gz") in said.err
    assert run("learn", "--out", tmp_path / "none" / "o").status == 2
    few = run("learn", "--out", tmp_path / "o", "--population", "1")
    assert "--population 1: give 4 or more" in few.err


def test_halves_do_not_overlap() -> None:
    lessons = read_lessons(HALVES, Path("traces"))
    held = {lesson.name: lesson.setups for lesson in lessons.held_out}
    assert held.keys() == {lesson.name for lesson in lessons.train}
    for lesson in lessons.train:
        train, other = lesson.setups[0].workload, held[lesson.name][0].workload
        if train.seconds is None:
            assert not {s.seed for s in lesson.setups} & {s.seed for s in held[lesson.name]}
        else:
            assert other.skip_s == train.seconds
            assert other.seconds is None

"""Learning: the objective by hand, a search that goes on where it was, a tiny real one."""

from __future__ import annotations

import io
import json
import math
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from policies.load import load
from policies.published.choice_features import FEATURES
from simulator.learn.command import HALVES, LearnCommand, run_learn
from simulator.learn.journal import Generation, Journal
from simulator.learn.lessons import read_lessons
from simulator.learn.objective import LOST_S, Figures, figures, score
from simulator.learn.search import LMETRIC, PINNED, Search, spec_of
from simulator.sweep.errors import SweepError
from tests.effort import EFFORT
from tests.simulator import bowl, synthetic
from tests.simulator.cli_support import Run, run

__all__ = ["run"]
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


# --- the objective ------------------------------------------------------------------------------


def test_a_lost_request_counts_as_ten_minutes() -> None:
    row = synthetic.evaluate(synthetic.setup())
    times = msgspec.structs.replace(row.ttft_ms, mean=2_000.0)
    row = msgspec.structs.replace(row, requests=4, completed=3, ttft_ms=times, e2e_ms=times)
    assert figures(row) == Figures((3 * 2.0 + LOST_S) / 4, (3 * 2.0 + LOST_S) / 4, 1)
    none = msgspec.structs.replace(times, mean=None)
    lost = msgspec.structs.replace(row, completed=0, ttft_ms=none, e2e_ms=none)
    assert figures(lost) == Figures(LOST_S, LOST_S, 4)
    assert figures(None) == Figures(LOST_S, LOST_S, 0)


def test_the_score_is_a_mean_over_lessons_of_means_over_seeds() -> None:
    start = [[Figures(1.0, 10.0, 0), Figures(2.0, 10.0, 0)], [Figures(4.0, 8.0, 0)]]
    found = [[Figures(0.5, 10.0, 0), Figures(2.0, 5.0, 0)], [Figures(8.0, 4.0, 0)]]
    assert score(start, start) == 0.0
    assert score(found, start) == pytest.approx((-math.log(2.0) + 0.0) / 2)


# --- the search ---------------------------------------------------------------------------------


def test_it_begins_as_lmetric_and_holds_the_scale() -> None:
    assert dict(zip(FEATURES, LMETRIC, strict=True))["log_batch"] == -1.0
    search = Search(0.05, 1, None)
    assert search.population == 13
    assert search.mean == LMETRIC
    for theta in search.ask():
        assert theta[PINNED] == -1.0
        assert len(theta) == len(FEATURES)
        loaded = load(spec_of(theta))
        assert [float(text) for text in str(loaded.params["theta"]).split(",")] == list(theta)


def test_what_is_worse_than_the_start_is_not_taken() -> None:
    search = Search(0.05, 1, 4)
    thetas = search.ask()
    search.tell(thetas, [1.0, 2.0, 0.0, 3.0])
    assert (search.best, search.best_score) == (LMETRIC, 0.0)
    thetas = search.ask()
    search.tell(thetas, [1.0, -0.5, -0.2, 3.0])
    assert (search.best, search.best_score) == (thetas[1], -0.5)


# --- the journal --------------------------------------------------------------------------------

START = [[Figures(1.0, 2.0, 0)]]


@settings(max_examples=30 * EFFORT, deadline=None)
@given(count=st.integers(0, 4), data=st.data())
def test_a_torn_journal_has_the_generations_that_were_whole(
    count: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal"
    ends = []
    with Journal(path, "run") as journal:
        journal.begin(START)
        ends.append(path.stat().st_size)
        for number in range(count):
            journal.add(Generation([LMETRIC], [float(number)]))
            ends.append(path.stat().st_size)
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = sum(end <= cut for end in ends)  # lines, the head included
    with Journal(path, "run") as journal:
        assert journal.start == (START if whole else None)
        assert [g.scores for g in journal.generations] == [[float(n)] for n in range(whole - 1)]
        if journal.start is None:
            journal.begin(START)
        journal.add(Generation([LMETRIC], [9.0]))
    with Journal(path, "run") as journal:
        assert journal.generations[-1].scores == [9.0]


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, "one") as journal:
        journal.begin(START)
        with pytest.raises(SweepError, match="another run writes to it"):
            Journal(path, "one")
    with pytest.raises(SweepError, match="of other lessons, traces or settings"):
        Journal(path, "another")
    path.write_text("name,age\n")
    with pytest.raises(SweepError, match=r"journal:1: no line of a learning run"):
        Journal(path, "one")


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

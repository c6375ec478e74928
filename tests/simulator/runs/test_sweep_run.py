"""Tests of sweeps in processes: every run ends once, whatever happens to the processes and the
results file.
"""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from simulator.replay.setup import Setup
from simulator.runs.points import points_of
from simulator.runs.runs import RunOptions, RunResults, estimate_s, sweep
from simulator.runs.store import HEADER, Store
from simulator.runs.sweep import SweepReport, as_csv, as_json
from simulator.runs.task import Keys, RunOutcome, SweepError
from tests.effort import examples
from tests.simulator import synthetic

ROOT = Path(__file__).resolve().parents[3]
SEEDS = 3


def silent() -> Console:
    return Console(file=io.StringIO(), width=120)


def setups(count: int = SEEDS) -> list[Setup]:
    return [synthetic.setup(seed=seed) for seed in range(count)]


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    monkeypatch.setenv("SWEEP_MARKS", str(folder))
    return folder


def options(tmp_path: Path, jobs: int = 2) -> RunOptions:
    return RunOptions(tmp_path / "results.jsonl", jobs)


def test_results_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    asked = [synthetic.setup(policy, seed) for policy in synthetic.FACTORS for seed in range(2)]
    one = sweep(asked, RunOptions(tmp_path / "1", 1), silent(), synthetic.evaluate)
    three = sweep(asked, RunOptions(tmp_path / "3", 3), silent(), synthetic.evaluate)
    assert one == three
    assert [o.task.setup for o in one] == asked
    assert len({o.row.report_hash for o in one if o.row}) == len(asked)


def test_a_killed_process_costs_one_more_try(tmp_path: Path, marks: Path) -> None:
    outcomes = sweep(setups(), options(tmp_path), silent(), synthetic.killed_once)
    assert [o.error for o in outcomes] == [None] * SEEDS
    assert [o.attempts for o in outcomes] == [1, 2, 1]


def test_a_run_that_is_always_killed_fails_alone(tmp_path: Path, marks: Path) -> None:
    outcomes = sweep(setups(), options(tmp_path, jobs=1), silent(), synthetic.killed_always)
    assert outcomes[1].row is None
    assert outcomes[1].error == "its process was killed by SIGKILL, 2 times; too little memory?"
    assert outcomes[0].row is not None
    assert outcomes[2].row is not None
    assert len(list(marks.iterdir())) == 2


def test_a_run_that_raises_fails_alone_and_is_not_tried_again(tmp_path: Path, marks: Path) -> None:
    outcomes = sweep(setups(), options(tmp_path), silent(), synthetic.raises)
    assert outcomes[1].error == "ValueError: a prompt of 9,000 tokens fits no worker"
    assert [o.row is None for o in outcomes] == [False, True, False]
    assert len(list(marks.iterdir())) == 1


def test_a_sweep_resumes(tmp_path: Path, marks: Path) -> None:
    sweep(setups(2), options(tmp_path), silent(), synthetic.counted)
    assert len(list(marks.iterdir())) == 2
    more = [*setups(3), synthetic.setup("round_robin")]  # a changed file: two runs are new
    outcomes = sweep(more, options(tmp_path), silent(), synthetic.counted)
    assert len(list(marks.iterdir())) == 4
    assert outcomes == sweep(more, RunOptions(tmp_path / "new", 1), silent(), synthetic.evaluate)


def test_failed_runs_are_run_again(tmp_path: Path, marks: Path) -> None:
    sweep(setups(), options(tmp_path), silent(), synthetic.raises)
    outcomes = sweep(setups(), options(tmp_path), silent(), synthetic.counted)
    assert all(o.row is not None for o in outcomes)
    assert len(list(marks.glob("run-*"))) == 1


def test_a_changed_trace_gives_another_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("one")
    workload = synthetic.setup().workload
    asked = replace_workload(synthetic.setup(), str(trace))
    first = Keys().task(asked)
    assert Keys().task(asked) == first
    trace.write_text("two")
    assert Keys().task(asked).key != first.key
    assert workload.source == "gen:none"
    with pytest.raises(SweepError, match="nowhere: cannot be read: No such file"):
        Keys().task(replace_workload(synthetic.setup(), "nowhere"))


def replace_workload(setup: Setup, source: str) -> Setup:
    spec = msgspec.structs.replace(setup.workload, source=source)
    return msgspec.structs.replace(setup, workload=spec)


def outcomes(count: int = 4) -> list[RunOutcome]:
    keys = Keys()
    return [RunOutcome(keys.task(s), synthetic.evaluate(s)) for s in setups(count)]


@settings(max_examples=examples(30))
@given(cut=st.integers(min_value=0))
def test_a_torn_results_file_loses_only_its_torn_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "results"
    with Store(path) as store:
        for outcome in outcomes():
            store.add(outcome)
    whole = path.read_bytes()
    kept = whole[: cut % (len(whole) + 1)]
    path.write_bytes(kept)
    lines = max(0, kept.count(b"\n") - 1)
    with Store(path) as store:
        assert len(store.rows) == lines
        for outcome in outcomes()[lines:]:
            store.add(outcome)
    assert path.read_bytes() == whole


def test_files_that_are_no_results_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk")
    with pytest.raises(SweepError, match="not a file of sweep results"):
        Store(path)
    assert path.read_text() == "remember the milk"
    path.write_bytes(HEADER + b"{}\n")
    with pytest.raises(SweepError, match=r"notes\.txt:2: not a result .*missing.*remove that line"):
        Store(path)
    with pytest.raises(SweepError, match="cannot be written"):
        Store(path / "below")


def test_two_sweeps_do_not_share_a_file(tmp_path: Path) -> None:
    with Store(tmp_path / "r"), pytest.raises(SweepError, match="another sweep writes to it"):
        Store(tmp_path / "r")
    Store(tmp_path / "r").__exit__()


SWEEPER = """
import signal
import sys
from pathlib import Path
from rich.console import Console
from simulator.runs.runs import sweep
from simulator.runs.runs import RunOptions
from tests.simulator import synthetic

if __name__ == "__main__":
    # Whoever runs the tests in the background of a shell has them begun deaf to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked = [synthetic.setup(seed=seed) for seed in range(4)]
    try:
        sweep(asked, RunOptions(Path(sys.argv[1]), 3), Console(), synthetic.stays)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_remains_when_a_sweep_is_ended(
    tmp_path: Path, marks: Path, number: signal.Signals
) -> None:
    script = tmp_path / "sweeper.py"
    script.write_text(SWEEPER)
    results = tmp_path / "results"
    program = subprocess.Popen(
        [sys.executable, str(script), str(results)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: len(list(marks.iterdir())) == 3 and results.read_bytes().count(b"\n") == 2)
    pids = [int(mark.name.partition("-")[2]) for mark in marks.iterdir()]
    if number == signal.SIGINT:
        os.killpg(program.pid, number)  # as a terminal does
    else:
        program.kill()
    _, errors = program.communicate(timeout=120)
    assert program.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in errors
    until(lambda: not any(map(alive, pids)))
    with Store(results) as store:
        assert len(store.rows) == 1


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_estimate_uses_the_measured_runs(tmp_path: Path) -> None:
    keys = Keys()
    tasks = [keys.task(setup) for setup in setups(4)]
    assert estimate_s(tasks, [], jobs=2) is None
    assert estimate_s(tasks, outcomes(1), jobs=2) == pytest.approx(4 * 0.1 / 2)


def test_csv_and_json_have_the_same_figures() -> None:
    done = [*outcomes(2), replace_policy("round_robin")]
    report = as_json(done, points_of(done))
    decoded = msgspec.json.decode(report, type=SweepReport)
    lines = list(csv.DictReader(io.StringIO(as_csv(done))))
    assert [line["key"] for line in lines] == [run.key for run in decoded.runs]
    for line, run in zip(lines, decoded.runs, strict=True):
        assert run.row is not None
        assert float(line["ttft_ms.p90"]) == run.row.ttft_ms.p90
        assert float(line["tokens_per_s_gpu"]) == run.row.output_tokens_per_s / 8  # 4 x TP2
    assert [point.name for point in decoded.points] == ["hybrid", "round_robin"]
    assert decoded.points[0].seeds == (0, 1)
    assert [point.on_front for point in decoded.points] == [True, False]


def replace_policy(policy: str) -> RunOutcome:
    setup = synthetic.setup(policy)
    return RunOutcome(Keys().task(setup), synthetic.evaluate(setup))


def test_a_sweep_shows_the_remaining_runs_and_time(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    sweep(setups(2), options(tmp_path), console, synthetic.evaluate)
    sweep(setups(4), options(tmp_path, jobs=1), console, synthetic.evaluate)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 runs, 2 at a time\n" in text
    assert "2 runs, 1 at a time, about 1 s; 2 more are there already\n" in text
    clock, other = count(0.0, 4.0), RunOptions(tmp_path / "other", 1)
    with RunResults(other, console, synthetic.evaluate, lambda: next(clock)) as runs:
        runs.announce(setups(8))
        runs.outcomes(setups(8))
    lines = console.file.getvalue()[len(text) :].splitlines()  # type: ignore[attr-defined]
    assert lines[1:] == [
        "runs: 1 of 8, 28 s left", "runs: 4 of 8, 16 s left", "runs: 7 of 8, 4 s left",
    ]  # fmt: skip


def test_failed_runs_are_reported_at_once(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    with RunResults(options(tmp_path), console, synthetic.evaluate) as runs:
        task = Keys().task(synthetic.setup("hybrid", 3))
        runs._note(RunOutcome(task, None, "ValueError: [0] is none"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text == "failed hybrid, seed 3: ValueError: [0] is none\n"

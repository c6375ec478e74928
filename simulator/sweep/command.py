"""`warmroute-sim sweep` and `plan` from options to what is printed and written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from simulator.sweep.errors import SweepError
from simulator.sweep.evaluate import evaluate as evaluate_replay
from simulator.sweep.files import as_csv, as_json
from simulator.sweep.page import render_page
from simulator.sweep.plan import plan
from simulator.sweep.plan_console import as_json as plan_as_json
from simulator.sweep.plan_console import plan_lines, plan_table
from simulator.sweep.points import points_of
from simulator.sweep.question import PlanRequest
from simulator.sweep.run import sweep
from simulator.sweep.runs import RunOptions, Runs
from simulator.sweep.sheet import read_sheet
from simulator.sweep.table import MAX_TABLES, best_tables, by_scene, front_table
from simulator.sweep.task import Evaluate

RESULTS_SUFFIX = ".results.jsonl"


@dataclass(frozen=True, slots=True)
class SweepCommand:
    """What the command line asks of a sweep. Lifetime: process."""

    file: Path
    results: Path | None = None  # None: beside the file, with `RESULTS_SUFFIX`
    jobs: int | None = None
    dask: str | None = None
    csv: Path | None = None
    json: Path | None = None
    html: Path | None = None


def run_sweep(
    command: SweepCommand, console: Console, evaluate: Evaluate = evaluate_replay
) -> bool:
    """Runs the sweep, prints its tables, writes what is asked; whether no run failed.

    Raises `SweepError` before anything runs for what cannot be read, run or written. Ctrl-C
    (`KeyboardInterrupt`) ends all processes; the same command goes on from there.
    """
    writable(command.csv, command.json, command.html)
    setups = read_sheet(command.file)
    results = command.results or command.file.with_name(command.file.name + RESULTS_SUFFIX)
    options = RunOptions(results, command.jobs, command.dask)
    outcomes = sweep(setups, options, console, evaluate)
    points = points_of(outcomes)
    console.print(*best_tables(points))
    left_out = len(by_scene(points)) - MAX_TABLES
    if left_out > 0:
        console.print(f"{left_out} more loads and worlds are in --csv, --json and --html")
    if points:
        console.print(front_table(points))
    if command.csv is not None:
        command.csv.write_text(as_csv(outcomes))
    if command.json is not None:
        command.json.write_bytes(as_json(outcomes, points))
    if command.html is not None:
        notes = [
            f"Sweep file {command.file.name}. Workload: {setups[0].workload.source}.",
            "Replays of the real decision core and scheduler on virtual time; all seeds of a "
            "choice see the same workload as the same seeds of the others.",
        ]
        page = render_page(outcomes, points, f"Sweep {command.file.name}", notes)
        command.html.write_text(page)
    return all(outcome.error is None for outcome in outcomes)


def run_plan(
    request: PlanRequest,
    options: RunOptions,
    console: Console,
    json: Path | None = None,
    evaluate: Evaluate = evaluate_replay,
) -> bool:
    """Searches, prints the answer and its reasons, writes `json`; whether there is an answer.

    Raises `SweepError` and `KeyboardInterrupt` as `run_sweep` does.
    """
    writable(json)
    with Runs(options, console, evaluate) as runs:
        answer = plan(request, runs)
    console.print(plan_table(answer))
    for line in plan_lines(answer):
        console.print(line, highlight=False)
    if json is not None:
        json.write_bytes(plan_as_json(answer))
    return answer.best is not None


def writable(*paths: Path | None) -> None:
    """Raises `SweepError` for files that could not be written when all is done."""
    problems: Sequence[str] = [
        f"{path}: {why}" for path in paths if path is not None and (why := _refusal(path))
    ]
    if problems:
        raise SweepError(problems)


def _refusal(path: Path) -> str:
    if path.is_dir():
        return "is a folder; name a file"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; create it or name another"
    place = path if path.exists() else path.parent
    return "" if os.access(place, os.W_OK) else "may not be written; name another file"

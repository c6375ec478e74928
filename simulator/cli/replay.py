"""The command `replay`: every policy with every seed, then the reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from simulator.cli.replay_options import GENERATED, setups_of
from simulator.cli.usage import UsageError, check_files
from simulator.live.processes import StartError
from simulator.replay.observer import Observer
from simulator.replay.result import WARNING
from simulator.replay.run import ReplayProgress, replay
from simulator.replay.setup import Setup
from simulator.report.board import Board
from simulator.report.console import most_unserved, replay_tables, show_replay
from simulator.report.files import RequestsCsv, write_json
from simulator.report.replay_page import render_page
from simulator.report.row import ReplayRow, summarize
from simulator.report.view import HotPrefixes, RunView, view
from simulator.runs.executor import LocalProcesses
from simulator.runs.task import Task


class Replayed(NamedTuple):
    """What is kept of one replay."""

    row: ReplayRow
    notes: tuple[str, ...]  # what people should know of it
    seen: RunView | None  # what is drawn, where there is a page


ONE_RECORDING = (
    "Seeds of one recording: intervals say nothing of other traffic like it. --resamples N replays "
    "N draws of its sessions instead."
)
REPORTS = ("json", "html", "csv")
Done = Callable[[Setup, Replayed], None]


def run(options: argparse.Namespace, console: Console) -> bool:
    """Replays, prints the tables, writes what was asked for.

    False where a replay left most of its requests without an answer.
    """
    setups = setups_of(options)
    _check_reports(options, setups)
    found: dict[Setup, Replayed] = {}
    several = options.jobs > 1 and len(setups) > 1
    (_side_by_side if several else _one_by_one)(options, setups, console, found.__setitem__)
    kept = [found[setup] for setup in setups]
    rows = [one.row for one in kept]
    about = {"setups": [msgspec.to_builtins(setup) for setup in setups]}
    if options.json is not None:
        write_json(options.json, rows, about)
    if options.html is not None:
        views = [one.seen for one in kept if one.seen is not None]
        name = Path(options.trace).name
        options.html.write_text(render_page(rows, views, title=f"Replay of {name}"))
    console.print(replay_tables(rows, console.width))
    for note in dict.fromkeys(note for one in kept for note in one.notes):
        style = "yellow" if note.startswith(WARNING) else "dim"
        console.print(note, style=style, highlight=False, markup=False, soft_wrap=True)
    if _of_one_recording(setups):
        console.print(ONE_RECORDING, style="dim", highlight=False, soft_wrap=True)
    unserved = most_unserved(rows)
    for line in unserved:
        console.print(
            f"failed: {line}", style="bold red", highlight=False, markup=False, soft_wrap=True
        )
    return not unserved


def _of_one_recording(setups: Sequence[Setup]) -> bool:
    """Whether intervals over these seeds say less than they seem to."""
    work = setups[0].workload
    several = len({setup.seed for setup in setups}) > 1
    return several and not (work.resample or work.source.startswith(GENERATED))


def _check_reports(options: argparse.Namespace, setups: Sequence[Setup]) -> None:
    named = options.trace, *(group.profile for group in setups[0].groups), options.faults
    check_files(options, REPORTS, [name for name in named if name])
    if options.csv is not None and len(setups) > 1:
        raise UsageError(
            f"--csv holds one replay and this is {len(setups)}: name one --policy and one --seed"
        )


def _one_by_one(
    options: argparse.Namespace, setups: Sequence[Setup], console: Console, done: Done
) -> None:
    with Board(console) as board:
        for setup in setups:
            board.start(_label(setup))
            note = partial(show_replay, board, _label(setup))
            done(setup, _replayed(setup, options.html is not None, options.csv, note))
            board.end(_label(setup))


def _side_by_side(
    options: argparse.Namespace, setups: Sequence[Setup], console: Console, done: Done
) -> None:
    tasks = [Task(str(number), setup) for number, setup in enumerate(setups)]
    tried = partial(_tried, drawn=options.html is not None)
    with LocalProcesses(tried, min(options.jobs, len(setups))) as processes:
        for number, outcome in enumerate(processes.run(tasks), start=1):
            setup, one = outcome.task.setup, outcome.row
            if one is None:
                raise StartError(f"{_label(setup)}: {outcome.error}; fewer --jobs need less memory")
            if isinstance(one, Exception):
                raise one
            done(setup, one)
            console.print(
                f"{number} of {len(setups)}: {_label(setup)}, {one.row.wall_s:.1f} s",
                highlight=False,
            )


def _tried(setup: Setup, drawn: bool) -> Replayed | Exception:
    """One replay in a process of its own; what it raises is raised by whoever asked for it."""
    try:
        return _replayed(setup, drawn)
    except Exception as error:  # noqa: BLE001 - handed on
        return error


def _replayed(
    setup: Setup,
    drawn: bool,
    csv: Path | None = None,
    on_progress: Callable[[ReplayProgress], None] | None = None,
) -> Replayed:
    """One replay."""
    prefixes = HotPrefixes() if drawn else None
    observers: list[Observer] = [] if prefixes is None else [prefixes]
    if csv is None:
        result = replay(setup, on_progress=on_progress, observers=observers)
    else:
        with csv.open("w", encoding="utf-8", newline="") as file:
            writers = [*observers, RequestsCsv(file)]
            result = replay(setup, on_progress=on_progress, observers=writers)
    if prefixes is None:
        return Replayed(summarize(result), result.notes, None)
    result = replace(result, hot=prefixes.found(result.samples.time_ns))
    return Replayed(summarize(result), result.notes, view(result))


def _label(setup: Setup) -> str:
    return f"{setup.policy}, seed {setup.seed}"

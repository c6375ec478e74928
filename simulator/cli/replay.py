"""The commands `replay` (every policy with every seed, and the reports) and `sources`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Struct
from rich.console import Console

from simulator.cli.flags import Written, at_most, command
from simulator.cli.setups import GENERATED, MAX_DRAWS, Draws, SetupOptions, known, setup_of
from simulator.cli.usage import UsageError, check_files
from simulator.live.processes import StartError
from simulator.replay.fleet import check_setup
from simulator.replay.observer import Observer
from simulator.replay.result import WARNING
from simulator.replay.run import ReplayProgress
from simulator.replay.run import replay as replayed
from simulator.replay.setup import ReplayError, Setup
from simulator.report.board import Board
from simulator.report.console import most_unserved, replay_tables, show_replay
from simulator.report.files import RequestsCsv, write_json
from simulator.report.replay_page import render_page
from simulator.report.row import ReplayRow, summarize
from simulator.report.view import HotPrefixes, RunView, view
from simulator.runs.executor import LocalProcesses
from simulator.runs.task import Task
from simulator.workloads.open import help_lines


class Replayed(NamedTuple):
    """The results of one replay that are kept for the reports."""

    row: ReplayRow
    notes: tuple[str, ...]  # notes for the reader
    seen: RunView | None  # data of the plots; None without a page


ONE_RECORDING = (
    "Seeds of one recording: intervals say nothing of other traffic like it. --resamples N replays "
    "N draws of its sessions instead."
)
Done = Callable[[Setup, Replayed], None]

EXAMPLES = """\
TRACE is a file (JSON lines or CSV; plain, gzip or zstd; the format is found by looking) or a
generator, as gen:sglang?groups=64. `warmroute-sim sources` lists all of both.

examples:
  warmroute-sim replay requests.jsonl
  warmroute-sim replay requests.jsonl --policy hybrid --policy kv_load --workers 12 --html r.html
  warmroute-sim replay requests.jsonl --policy warmset --policy lmetric --resamples 10
  warmroute-sim replay requests.jsonl --rate 12 --seed 0 --seed 1 --seed 2 --json r.json
  warmroute-sim replay sessions.jsonl.gz --closed-loop --kv-tokens 300k --faults faults.yaml
  warmroute-sim replay gen:sglang --group count=6,profile=qwen3-32b-h100-tp2 \\
      --group count=2,profile=qwen3-32b-h200-tp2
"""


class Replay(Struct, kw_only=True):
    """The options of `replay`."""

    draws: Draws
    resamples: Annotated[int | None, at_most(MAX_DRAWS), "replay N draws of TRACE, all for every "
        "policy: --resample with N seeds from --seed on; for a generator, N seeds"
    ] = None  # fmt: skip
    setup: SetupOptions
    jobs: Annotated[int, "number of replays that run at a time, each in a process"] = 1
    json: Annotated[Written, "file that gets all figures, with hashes"] = None
    html: Annotated[Written, "page with the results; its pictures need matplotlib"] = None
    csv: Annotated[Written, "file that gets each request with its decision and the best choice; "
        "for one --policy and one --seed"] = None  # fmt: skip


@command("TRACE [--policy SPEC]... [--workers N] [--profile P] [option]...", EXAMPLES + known())
def replay(options: Replay, console: Console) -> bool:
    """Replays the requests of TRACE through the router's own decision core and policies and the
    engine's own scheduler, with modelled step times, and prints latency, hits and balance for each
    policy. A replay needs no GPU and runs faster than real time. Ends with 1 if a replay leaves
    more than half of its requests without a whole answer.
    """
    setups = _setups(options)
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
        name = Path(options.setup.trace).name
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


def _setups(options: Replay) -> list[Setup]:
    """Return one set-up per policy and seed, with seeds varying fastest; raises `UsageError`."""
    several = options.resamples and not options.setup.trace.startswith(GENERATED)
    resample = options.draws.resample or bool(several)
    setups = [
        setup_of(options.setup, policy, seed, resample=resample)
        for policy in options.draws.policies()
        for seed in _seeds(options)
    ]
    for setup in setups:
        try:
            check_setup(setup)
        except ReplayError as error:
            raise UsageError(str(error)) from error
    return setups


def _seeds(options: Replay) -> Sequence[int]:
    """Return the seeds that were named, or as many from the first one on as --resamples
    asks for.
    """
    named = list(dict.fromkeys(options.draws.seed or (0,)))
    if options.resamples is None:
        return named
    if len(named) > 1:
        raise UsageError("--resamples takes the seeds that follow one --seed; name one at most")
    if options.resamples < 2:
        raise UsageError("--resamples: 2 or more, for one draw has no interval; --resample is one")
    return range(named[0], named[0] + options.resamples)


def _of_one_recording(setups: Sequence[Setup]) -> bool:
    """Return True if the seeds only break ties in the replay of one recording, so that intervals
    over them mean little.
    """
    work = setups[0].workload
    several = len({setup.seed for setup in setups}) > 1
    return several and not (work.resample or work.source.startswith(GENERATED))


def _check_reports(options: Replay, setups: Sequence[Setup]) -> None:
    profiles = [group.profile for group in setups[0].groups]
    read = [options.setup.trace, *profiles, options.setup.around.faults]
    check_files(read, json=options.json, html=options.html, csv=options.csv)
    if options.csv is not None and len(setups) > 1:
        raise UsageError(
            f"--csv holds one replay and this is {len(setups)}: name one --policy and one --seed"
        )


def _one_by_one(options: Replay, setups: Sequence[Setup], console: Console, done: Done) -> None:
    with Board(console) as board:
        for setup in setups:
            board.start(_label(setup))
            note = partial(show_replay, board, _label(setup))
            done(setup, _replayed(setup, options.html is not None, options.csv, note))
            board.end(_label(setup))


def _side_by_side(options: Replay, setups: Sequence[Setup], console: Console, done: Done) -> None:
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
    """Run one replay in a child process; return its results or the exception that it raised, which
    the parent raises again.
    """
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
    """Run one replay and return its results."""
    prefixes = HotPrefixes() if drawn else None
    observers: list[Observer] = [] if prefixes is None else [prefixes]
    if csv is None:
        result = replayed(setup, on_progress=on_progress, observers=observers)
    else:
        with csv.open("w", encoding="utf-8", newline="") as file:
            writers = [*observers, RequestsCsv(file)]
            result = replayed(setup, on_progress=on_progress, observers=writers)
    if prefixes is None:
        return Replayed(summarize(result), result.notes, None)
    result = replace(result, hot=prefixes.found(result.samples.time_ns))
    return Replayed(summarize(result), result.notes, view(result))


def _label(setup: Setup) -> str:
    return f"{setup.policy}, seed {setup.seed}"


class Sources(Struct):
    """The options of the command `sources`, which has no flags."""


@command("")
def sources(options: Sources, console: Console) -> bool:
    """Lists the formats of trace files and the generators, with their keys and defaults."""
    for line in help_lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return True

"""The study behind `docs/notes/policy-study.md`: its sweeps with their policies and seeds, which
can be interrupted and resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from simulator import DATA
from simulator.replay.setup import Setup
from simulator.runs.compare import run_compare
from simulator.runs.runs import RunOptions, RunResults
from simulator.runs.runs import evaluate as evaluate_replay
from simulator.runs.sheet import parse_sheet, setups_of
from simulator.runs.task import Evaluate, SweepError, unknown
from simulator.yaml_file import YamlFileError, read_yaml

HERE = DATA / "study"
LIST = HERE / "study.yaml"
GENERATOR = "gen:"
QUICK_REQUESTS = 150
QUICK_RULES = 2
MAX_SEEDS = 1000


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the list of the study's sweeps."""

    sweep: str  # a sweep file beside the list, without its suffix
    rules: str  # one of the list's sets
    seeds: int  # 1 to so many
    name: str = ""  # name of its results; "": as the sweep
    grid: dict[str, Any] = {}  # in place of the sweep file's own


class StudyList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole list of sweeps in the study."""

    rules: dict[str, tuple[str, ...]]
    first: tuple[Entry, ...]
    full: tuple[Entry, ...] = ()
    table: tuple[Entry, ...] = ()  # seeds are draws of the traces


@dataclass(frozen=True, slots=True)
class StudyPart:
    """The part of the study that the user asked for. Lifetime: process."""

    traces: Path = Path()  # where trace files lie
    passes: Literal["first", "full", "table"] = "first"
    only: tuple[str, ...] = ()  # sweeps; empty: all of the pass
    policies: tuple[str, ...] = ()  # rules to run besides those of the list
    alone: bool = False  # only `policies`, without those of the list
    quick: bool = False  # one seed, two policies and few requests, to see that it works
    resamples: int | None = None  # seeds of each sweep, each a draw of its file; None: as listed

    @property
    def draws(self) -> bool:
        """True if each seed is another draw of a trace's sessions."""
        return self.resamples is not None or self.passes == "table"


@dataclass(frozen=True, slots=True)
class Step:
    """One sweep file of the study, with all its set-ups to run. Lifetime: study."""

    name: str
    setups: tuple[Setup, ...]


def read_steps(asked: StudyPart, file: Path = LIST) -> list[Step]:
    """Return the steps of the study in the list's order, one for each name of results, each run
    once. Raises `SweepError` for a wrong list or sweep file, an unknown sweep, and missing traces.
    """
    listed = _list(file)
    entries = {
        "first": listed.first,
        "full": (*listed.first, *listed.full),
        "table": listed.table,
    }[asked.passes]
    known = list(dict.fromkeys(entry.name or entry.sweep for entry in entries))
    problems = [unknown("sweeps", name, known) for name in asked.only if name not in known]
    if problems:
        raise SweepError(problems)
    names = [name for name in known if not asked.only or name in asked.only]
    steps = [
        _step(name, [e for e in entries if name == (e.name or e.sweep)], listed, asked, file.parent)
        for name in names
    ]
    _check_traces(steps)
    return steps


def _list(file: Path) -> StudyList:
    try:
        listed = msgspec.convert(read_yaml(file), StudyList)
    except YamlFileError as error:
        raise SweepError(error.problems) from error
    except msgspec.ValidationError as error:
        raise SweepError([f"{file}: {error}"]) from error
    problems = []
    for entry in (*listed.first, *listed.full, *listed.table):
        if entry.rules not in listed.rules:
            problems.append(unknown(f"{file}: {entry.sweep}", entry.rules, listed.rules))
        if not 1 <= entry.seeds <= MAX_SEEDS:
            problems.append(f"{file}: {entry.sweep}: {entry.seeds} seeds; expected 1..{MAX_SEEDS}")
    if problems:
        raise SweepError(problems)
    return listed


def _step(
    name: str, entries: Sequence[Entry], listed: StudyList, asked: StudyPart, folder: Path
) -> Step:
    found: dict[Setup, None] = {}
    for entry in entries:
        path = folder / f"{entry.sweep}.yaml"
        try:
            plain = read_yaml(path)
        except YamlFileError as error:
            raise SweepError(error.problems) from error
        _place(plain, asked.traces, resample=asked.draws)
        rules = () if asked.alone else listed.rules[entry.rules]
        policies = [*rules, *asked.policies]
        seeds = list(range(1, (asked.resamples or entry.seeds) + 1))
        if asked.quick:
            policies, seeds = policies[:QUICK_RULES], [1]
        grid = entry.grid or plain.get("grid", {})
        grid = {**grid, "policies": list(dict.fromkeys(policies)), "seeds": seeds}
        try:
            found.update(dict.fromkeys(setups_of(parse_sheet({**plain, "grid": grid}))))
        except SweepError as error:
            raise SweepError([f"{path}: {line}" for line in error.problems]) from error
    setups = list(found)
    return Step(name, tuple(_short(setups) if asked.quick else setups))


def _place(plain: dict[str, Any], traces: Path, *, resample: bool) -> None:
    """Put the folder of traces before the file name of the workload in `plain`; with `resample`,
    make each seed another draw of the sessions.
    """
    workload = plain.get("workload")
    if isinstance(workload, dict) and isinstance(workload.get("source"), str):
        source = workload["source"]
        if not source.startswith(GENERATOR):
            workload["source"] = str(traces / source)
            if resample:
                workload["resample"] = True


def _short(setups: Sequence[Setup]) -> list[Setup]:
    """Return the first set-up of each policy, with few requests."""
    first: dict[str, Setup] = {}
    for setup in setups:
        work = msgspec.structs.replace(setup.workload, requests=QUICK_REQUESTS)
        first.setdefault(setup.policy, msgspec.structs.replace(setup, workload=work))
    return list(first.values())


def _check_traces(steps: Sequence[Step]) -> None:
    sources = {s.workload.source: step.name for step in steps for s in step.setups}
    missing = [
        f"{source}: there is no such trace, which {name} wants; say where traces lie with "
        "--traces FOLDER, or name other sweeps with --only"
        for source, name in sources.items()
        if not source.startswith(GENERATOR) and not Path(source).is_file()
    ]
    if missing:
        raise SweepError(missing)


SUFFIX = ".results.jsonl"


def run_study(
    asked: StudyPart,
    out: Path,
    base: str,
    console: Console,
    jobs: int | None = None,
    evaluate: Evaluate = evaluate_replay,
) -> bool:
    """Run those of the study's sweeps that are missing, compare all, and return True if no run
    failed.

    Results are kept in `out` as runs end; those of draws are in a folder of their own there. Ctrl-C
    ends all processes, and the same command resumes. Raises `SweepError` before anything runs for
    what cannot be read or written.
    """
    steps = read_steps(asked)
    kept = "quick" if asked.quick else "table" if asked.passes == "table" else "draws"
    folder = out / kept if asked.quick or asked.draws else out
    files = [folder / f"{step.name}{SUFFIX}" for step in steps]
    for number, (step, file) in enumerate(zip(steps, files, strict=True), 1):
        console.print(f"{number}/{len(steps)} {step.name}", style="bold", highlight=False)
        with RunResults(RunOptions(file, jobs), console, evaluate) as runs:
            runs.announce(step.setups)
            runs.outcomes(step.setups)
    run = {setup.policy for step in steps for setup in step.setups}
    if asked.quick and base not in run:  # of the list's rules it takes two
        base = min(run)
    json, html, markdown = (folder / f"study.{kind}" for kind in ("json", "html", "md"))
    sound = run_compare(files, base, console, json=json, html=html, markdown=markdown)
    console.print(f"written: {', '.join(f'study.{k}' for k in ('json', 'html', 'md'))} in {folder}")
    return sound

"""`warmroute-sim study` from options to results, tables and a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from simulator.compare.command import CompareCommand, run_compare
from simulator.study.steps import Asked, read_steps
from simulator.sweep.evaluate import evaluate as evaluate_replay
from simulator.sweep.runs import RunOptions, Runs
from simulator.sweep.task import Evaluate

SUFFIX = ".results.jsonl"


@dataclass(frozen=True, slots=True)
class StudyCommand:
    """What the command line asks. Lifetime: process."""

    asked: Asked
    out: Path
    base: str
    jobs: int | None = None


def run_study(
    command: StudyCommand, console: Console, evaluate: Evaluate = evaluate_replay
) -> bool:
    """Runs what is missing, sweep by sweep, then compares all; whether no run failed.

    Results are kept in `out` as they come: Ctrl-C ends all processes, the same command goes on.
    Raises `SweepError` before anything runs for what cannot be read or written.
    """
    steps = read_steps(command.asked)
    folder = command.out / "quick" if command.asked.quick else command.out
    files = [folder / f"{step.name}{SUFFIX}" for step in steps]
    for number, (step, file) in enumerate(zip(steps, files, strict=True), 1):
        console.print(f"{number}/{len(steps)} {step.name}", style="bold", highlight=False)
        with Runs(RunOptions(file, command.jobs), console, evaluate) as runs:
            runs.announce(step.setups)
            runs.outcomes(step.setups)
    base, run = command.base, {setup.policy for step in steps for setup in step.setups}
    if command.asked.quick and base not in run:  # of the list's rules it takes two
        base = min(run)
    compared = CompareCommand(
        tuple(files),
        base,
        json=folder / "study.json",
        html=folder / "study.html",
        markdown=folder / "study.md",
    )
    sound = run_compare(compared, console)
    console.print(f"written: {', '.join(f'study.{k}' for k in ('json', 'html', 'md'))} in {folder}")
    return sound

"""A sweep from its set-ups to its outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from simulator.replay.setup import Setup
from simulator.sweep.evaluate import evaluate as evaluate_replay
from simulator.sweep.runs import RunOptions, Runs
from simulator.sweep.task import Evaluate, Outcome


def sweep(
    setups: Sequence[Setup],
    options: RunOptions,
    console: Console,
    evaluate: Evaluate = evaluate_replay,
) -> list[Outcome]:
    """The outcome of each set-up, in their order; a failed run is an outcome as well.

    Says before it starts how many runs there are. Ctrl-C ends all processes; the file of results
    keeps what is done. Raises `SweepError` before anything runs for files that cannot be used.
    """
    with Runs(options, console, evaluate) as runs:
        runs.announce(setups)
        return runs.outcomes(setups)

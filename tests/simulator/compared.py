"""Makes results of runs for tests of comparisons, in a file as a sweep writes it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from simulator.replay.setup import Setup
from simulator.report.row import GoodputShare, ReplayRow, Spread, TasksRow
from simulator.runs.store import Store
from simulator.runs.task import Keys, RunOutcome
from tests.simulator.synthetic import evaluate


def row_of(
    asked: Setup, ttft_ms: float, good: float = 1.0, lost: int = 0, *, grouped: bool = False
) -> ReplayRow:
    """Return a row whose mean time to first token is `ttft_ms`. The p99 of later turns is three
    times as long, and a task takes a hundred times as long. `grouped` says that the workload has
    groups.
    """
    row = evaluate(asked)
    spread = Spread(ttft_ms, ttft_ms, ttft_ms, ttft_ms, 3 * ttft_ms, 4 * ttft_ms)
    return msgspec.structs.replace(
        row,
        policy=asked.policy,
        requests=100,
        completed=100 - lost,
        rejected=lost,
        ttft_ms=spread,
        continuations=msgspec.structs.replace(row.continuations, ttft_ms=spread),
        goodput=GoodputShare(2000.0, 50.0, good),
        tasks=TasksRow(10, 10, Spread(*[100 * ttft_ms] * 6), 0.875, grouped),
    )


def written(path: Path, runs: list[tuple[Setup, ReplayRow | None]]) -> Path:
    """Write a file with the results `runs`; return its path."""
    keys = Keys()
    with Store(path) as store:
        for asked, row in runs:
            error = None if row is not None else "ValueError: no room"
            store.add(RunOutcome(keys.task(asked), row, error))
    return path

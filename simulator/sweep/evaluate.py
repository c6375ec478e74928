"""The run that a sweep repeats: one replay, summed up as one row."""

from __future__ import annotations

from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow, summarize


def evaluate(setup: Setup) -> ReplayRow:
    """The figures of one replay. Raises what the replay raises for a set-up that cannot run."""
    # Imported where it runs: whoever only sends this function away does without the replay.
    from simulator.replay.run import replay

    return summarize(replay(setup))

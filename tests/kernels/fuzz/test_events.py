"""Hostile KV events against the native code."""

from pathlib import Path

from tests.effort import EFFORT
from tests.kernels.event_vectors import vectors
from tests.kernels.fuzz.fuzzing import fuzz


def test_hostile_events(clang: None, tmp_path: Path) -> None:
    """A fixed number of inputs, begun with what engines send."""
    seeds = {name: vector.payload for name, vector in vectors().items()}
    fuzz("events", seeds, tmp_path, 10_000 * EFFORT)

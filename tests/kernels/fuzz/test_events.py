"""Tests of the native code with hostile KV events."""

from pathlib import Path

from tests.effort import EFFORT
from tests.kernels.event_vectors import vectors
from tests.kernels.fuzz.fuzzing import fuzz


def test_mutated_events_do_not_crash_the_decoder(clang: None, tmp_path: Path) -> None:
    """The native code survives a fixed number of mutated inputs that start from events of real
    engines.
    """
    seeds = {name: vector.payload for name, vector in vectors().items()}
    fuzz("events", seeds, tmp_path, 10_000 * EFFORT)

"""How hard tests try: TEST_EFFORT=N makes them try N times as hard; without it they are quick."""

from __future__ import annotations

import os

QUICK = "TEST_EFFORT" not in os.environ
EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
QUICK_EXAMPLES = 25


def examples(wanted: int) -> int:
    """How many examples a property gets that wants so many: at most 25 unless TEST_EFFORT says."""
    return min(wanted, QUICK_EXAMPLES) if QUICK else wanted * EFFORT

"""The effort of tests: with TEST_EFFORT=N they run N times as many examples; without it they are
quick.
"""

from __future__ import annotations

import os

QUICK = "TEST_EFFORT" not in os.environ
EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
QUICK_EXAMPLES = 25


def examples(wanted: int) -> int:
    """Return the number of examples for a property that wants `wanted`: at most 25, or N times as
    many with TEST_EFFORT=N.
    """
    return min(wanted, QUICK_EXAMPLES) if QUICK else wanted * EFFORT

"""Python's collector of reference cycles, told what a router is like.

A request leaves no cycle behind (`tests/router` holds it to that), but its hundred or so objects
live while it runs. At Python's own thresholds the collector looks at those of all requests in
flight again and again, and with them at everything that lives as long as the router: a third of
the CPU of a request (`docs/notes/performance.md`).
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000  # more than a few hundred requests in flight have
YOUNG_ROUNDS, MIDDLE_ROUNDS = 20, 50  # collections of one generation before one of the next


def settle() -> None:
    """Take what lives now for what lives as long as the router; look for cycles more rarely.

    Call it once the router is built. Cycles are still found, at the latest after
    YOUNG_OBJECTS * YOUNG_ROUNDS * MIDDLE_ROUNDS new objects that stay.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, MIDDLE_ROUNDS)


def release() -> None:
    """Let what `settle` set apart be collected like anything else: the router ends."""
    gc.unfreeze()

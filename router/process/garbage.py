"""Sets how often the router's process looks for garbage in cycles.

A request leaves no cycle behind (`tests/router` checks that), but its hundred or so objects live
while it runs. With Python's own thresholds the collector visits the objects of all running requests
again and again, and with them all objects that live as long as the router. This took a third of the
CPU time of a request (`docs/notes/performance.md`).
"""

from __future__ import annotations

import gc
import sys

YOUNG_OBJECTS = 20_000  # more than a few hundred requests in flight have
YOUNG_ROUNDS, MIDDLE_ROUNDS = 20, 50  # collections of one generation before one of the next
SWITCH_S = 0.0005  # the event loop asks for Python's lock once an event: it must not wait 5 ms then


def settle() -> None:
    """Treat all present objects as permanent, look for cycles more rarely, and let threads that
    read long bodies yield sooner. It is called once, after the router was built.

    Cycles are still found, at the latest after YOUNG_OBJECTS * YOUNG_ROUNDS * MIDDLE_ROUNDS new
    objects that stay alive.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, MIDDLE_ROUNDS)
    sys.setswitchinterval(SWITCH_S)


def release() -> None:
    """Let the collector free the objects again that `settle` made permanent, because the router
    ends.
    """
    gc.unfreeze()

"""Handles a policy that hangs or is slow: it is detected and logged, and the process ends if it
must.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from router.core.placement.guard import PolicyFaultError, PolicyGuard, Use
from router.record.logs import worth_a_line

log = logging.getLogger(__name__)


HUNG_STATUS = 70  # of the process (sysexits.h, EX_SOFTWARE): nothing else ends with it
_LOOKS = 4  # within the time that is too long
_CPU_FACTOR = 3.0  # so many times that, in CPU time during which no thread of Python's ran
# The CPU time of this thread, if Linux reports it; elsewhere all time counts as the thread's own.
THREAD_USE: Callable[[], Use] | None = (
    partial(resource.getrusage, resource.RUSAGE_THREAD) if sys.platform == "linux" else None
)


class PolicyTrouble:
    """Logs a policy's faults at the 1st, 2nd, 4th, 8th ... of a kind. Lifetime: process.

    Every request may meet the same fault, which must not fill the log.
    """

    def __init__(self) -> None:
        self._faults: Counter[str] = Counter()  # by kind; reset for each policy
        self._policy = ""

    def report(self, fault: PolicyFaultError) -> None:
        """Count a fault, and log it if it is due."""
        if fault.policy != self._policy:
            self._policy = fault.policy
            self._faults.clear()
        self._faults[fault.kind] += 1
        count = self._faults[fault.kind]
        if worth_a_line(count):
            cause = fault.__cause__ if fault.kind in ("raised", "terms") else None
            log.error("policy fault %d (%s): %s", count, fault.kind, fault, exc_info=cause)
        if fault.suspended_s:
            log.error(
                "policy %s is suspended for %g s; the fallback decides",
                fault.policy,
                fault.suspended_s,
            )


class HangWatch:
    """A thread that ends the process if one call of the policy lasts too long.

    The event loop cannot do that, because it waits for the policy. The program that started the
    process restarts it (`docs/deploy`), and finds on stderr which policy hung, and where. Code that
    never releases the interpreter stops this thread, too; then the process's own CPU time runs out,
    and SIGPROF kills it after its stack was written. Lifetime: process.
    """

    def __init__(self, guard: PolicyGuard, clock: Callable[[], float], hang_s: float) -> None:
        self._guard = guard
        self._clock = clock
        self._hang_s = hang_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="policy watch", daemon=True)

    def start(self) -> None:
        """Begin to watch. Call it in the main thread."""
        faulthandler.register(signal.SIGPROF, file=sys.stderr, chain=True)
        self._wind_up()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, because the router ends by itself."""
        self._over.set()
        self._thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        faulthandler.unregister(signal.SIGPROF)

    def _watch(self) -> None:
        suspected_s = float("inf")  # a call that was too long at the last look
        while not self._over.wait(self._hang_s / _LOOKS):
            self._wind_up()
            since_s = self._guard.since_s
            if self._clock() - since_s < self._hang_s:
                continue
            if since_s == suspected_s:  # seen twice: not a process that was just now stopped
                self._end(self._clock() - since_s)
            suspected_s = since_s

    def _wind_up(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._hang_s * _CPU_FACTOR)

    def _end(self, lasted_s: float) -> None:
        """End the process. The text does not go through `logging`, whose locks may be part of the
        trouble.
        """
        policy = self._guard.policy
        text = (
            f"policy {policy.name} hangs: no answer for {lasted_s:.1f} s ({policy.spec}); "
            f"this process ends with status {HUNG_STATUS}, to be started anew\n"
        )
        os.write(sys.stderr.fileno(), text.encode(errors="replace"))
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(HUNG_STATUS)

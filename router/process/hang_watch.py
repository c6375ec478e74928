"""Detects and logs policies that hang or are slow, and ends the process if a policy never
returns.
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


HUNG_STATUS = 70  # exit status after a hang (sysexits.h, EX_SOFTWARE); nothing else uses it
_CHECKS = 4  # checks within the time after which the process counts as hung
_CPU_FACTOR = 3.0  # times that limit, in CPU time, without a turn of any Python thread
# The CPU time of this thread, if Linux reports it; elsewhere all time counts as the thread's own.
THREAD_USE: Callable[[], Use] | None = (
    partial(resource.getrusage, resource.RUSAGE_THREAD) if sys.platform == "linux" else None
)


class PolicyTrouble:
    """Logs the faults of a policy, each kind of fault at its 1st, 2nd, 4th, 8th ... occurrence.
    Lifetime: process.

    Every request may cause the same fault, which must not fill the log.
    """

    def __init__(self) -> None:
        self._faults: Counter[str] = Counter()  # by kind; reset for each policy
        self._policy = ""

    def report(self, fault: PolicyFaultError) -> None:
        """Count a fault, and log it if this occurrence is one to log."""
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
    """A thread that ends the process if one call of the policy takes too long. Lifetime: process.

    The event loop cannot do that, because it waits for the policy. The program that started the
    process restarts it (`docs/deploy`), and stderr says which policy hung, and where. A policy
    whose code never releases the interpreter stops this thread, too; then the process's CPU time
    limit runs out, and SIGPROF ends it after its stack was written.
    """

    def __init__(self, guard: PolicyGuard, clock: Callable[[], float], hang_s: float) -> None:
        self._guard = guard
        self._clock = clock
        self._hang_s = hang_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="policy watch", daemon=True)

    def start(self) -> None:
        """Begin to watch the policy's calls. It must be called in the main thread."""
        faulthandler.register(signal.SIGPROF, file=sys.stderr, chain=True)
        self._wind_up()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, because the router is ending normally."""
        self._over.set()
        self._thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        faulthandler.unregister(signal.SIGPROF)

    def _watch(self) -> None:
        suspected_s = float("inf")  # a call that was too long at the last look
        while not self._over.wait(self._hang_s / _CHECKS):
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
        """End the process because a call of the policy has taken `lasted_s` seconds.

        The message does not use `logging`, because its locks may be held by the code that hangs.
        """
        policy = self._guard.policy
        text = (
            f"policy {policy.name} hangs: no answer for {lasted_s:.1f} s ({policy.spec}); "
            f"this process ends with status {HUNG_STATUS}, to be started anew\n"
        )
        os.write(sys.stderr.fileno(), text.encode(errors="replace"))
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(HUNG_STATUS)

"""The router's process: its garbage collector, its end where a policy hangs, signs of life.

A request leaves no cycle behind (`tests/router` holds it to that), but its hundred or so objects
live while it runs. At Python's own thresholds the collector looks at those of all requests in
flight again and again, and with them at everything that lives as long as the router: a third of
the CPU of a request (`docs/notes/performance.md`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from router.core.placement.guard import PolicyFaultError, PolicyGuard, Use
from router.record.logs import worth_a_line

YOUNG_OBJECTS = 20_000  # more than a few hundred requests in flight have
YOUNG_ROUNDS, MIDDLE_ROUNDS = 20, 50  # collections of one generation before one of the next
SWITCH_S = 0.0005  # the event loop asks for Python's lock once an event: it must not wait 5 ms then


def settle() -> None:
    """Take what lives now for what lives as long as the router; look for cycles more rarely, and
    let threads that read long bodies give way sooner.

    Call it once the router is built. Cycles are still found, at the latest after
    YOUNG_OBJECTS * YOUNG_ROUNDS * MIDDLE_ROUNDS new objects that stay.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, MIDDLE_ROUNDS)
    sys.setswitchinterval(SWITCH_S)


def release() -> None:
    """Let what `settle` set apart be collected like anything else: the router ends."""
    gc.unfreeze()


def notify(*lines: str) -> None:
    """`READY=1` and the like; nothing where nobody wants to know."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where.startswith(("/", "@")):
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            line.sendto("\n".join(lines).encode(), address)
    except OSError:
        pass  # who started us went away: it matters to nobody then


def notify_ready() -> None:
    """This process is the one that serves, also where another one was before."""
    notify(f"MAINPID={os.getpid()}", "READY=1", "STATUS=serving")


@contextmanager
def reloading() -> Iterator[None]:
    """The configuration is being read anew."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        yield
    finally:
        notify("READY=1")


def watchdog_s() -> float | None:
    """How long systemd waits for a sign of life before it ends this process; None: for ever.

    WATCHDOG_PID is the process that was started; who follows it (`Successor`) has none.
    """
    wanted, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (wanted.isdecimal() and int(wanted)) or pid not in ("", str(os.getpid())):
        return None
    return int(wanted) / 1e6


class Pulse:
    """Shows that the router goes on: to systemd's watchdog, and to probes by `/health`.

    Each beat is one turn of the event loop and one of the relay's thread. A loop that does not
    turn tells nobody anything; if the thread alone hangs, `/health` says so. Lifetime: process.
    """

    def __init__(self, beat: Callable[[], Awaitable[None]], clock: Callable[[], float]) -> None:
        """`beat` returns once the relay's thread has had a turn."""
        self._serves = False
        self._beat = beat
        self._clock = clock
        watched_s = watchdog_s()
        self._every_s = _BEAT_S if watched_s is None else min(watched_s / 2, _BEAT_S)
        self._asked_s = math.inf  # when the beat under way began

    def serve(self, serves: bool) -> None:
        """Whether it is this process that systemd watches, from now on."""
        self._serves = serves

    @property
    def serves(self) -> bool:
        """This process serves, and no other in its place."""
        return self._serves

    def hangs(self) -> str:
        """What does not go on; "": all does."""
        return "the relay's thread hangs" if self._clock() - self._asked_s > _THREAD_S else ""

    async def run(self) -> None:
        """Beat for ever."""
        while True:
            self._asked_s = self._clock()
            await self._beat()
            self._asked_s = math.inf
            if self._serves:
                notify("WATCHDOG=1")
            await asyncio.sleep(self._every_s)


log = logging.getLogger(__name__)

HUNG_STATUS = 70  # of the process (sysexits.h, EX_SOFTWARE): nothing else ends with it
_LOOKS = 4  # within the time that is too long
_BEAT_S = 1.0  # at least as often
_THREAD_S = 5.0  # a turn of the relay's thread takes microseconds
_CPU_FACTOR = 3.0  # so many times that, in CPU time during which no thread of Python's ran


# What this thread has used, where Linux tells it; elsewhere all time counts as the thread's own.
THREAD_USE: Callable[[], Use] | None = (
    partial(resource.getrusage, resource.RUSAGE_THREAD) if sys.platform == "linux" else None
)


class PolicyTrouble:
    """Tells of a policy's faults at the 1st, 2nd, 4th, 8th ... of a kind. Lifetime: process.

    Every request may meet the same one, and must not fill the log.
    """

    def __init__(self) -> None:
        self._faults: Counter[str] = Counter()  # by kind; anew for each policy
        self._policy = ""

    def report(self, fault: PolicyFaultError) -> None:
        """One more fault."""
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
    """A thread that ends the process when one call of the policy lasts too long.

    The event loop cannot help itself: it waits for the policy. Who started the process starts it
    anew (`docs/deploy`), and finds on stderr which policy it was and where it stood. Code that
    never lets go of the interpreter stops this thread, too; then the process's own CPU time runs
    out, and it dies of SIGPROF after its stack was written. Lifetime: process.
    """

    def __init__(self, guard: PolicyGuard, clock: Callable[[], float], hang_s: float) -> None:
        self._guard = guard
        self._clock = clock
        self._hang_s = hang_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="policy watch", daemon=True)

    def start(self) -> None:
        """From now on. To be called in the main thread."""
        faulthandler.register(signal.SIGPROF, file=sys.stderr, chain=True)
        self._wind_up()
        self._thread.start()

    def stop(self) -> None:
        """The router ends by itself."""
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
        """Not through `logging`, whose locks may be part of the trouble."""
        policy = self._guard.policy
        text = (
            f"policy {policy.name} hangs: no answer for {lasted_s:.1f} s ({policy.spec}); "
            f"this process ends with status {HUNG_STATUS}, to be started anew\n"
        )
        os.write(sys.stderr.fileno(), text.encode(errors="replace"))
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(HUNG_STATUS)

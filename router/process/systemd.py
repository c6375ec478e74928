"""Sends messages to systemd, and shows its watchdog and the probes of `/health` that the router
works.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

_BEAT_S = 1.0  # longest interval between two beats, seconds
_THREAD_S = 5.0  # timeout for one turn of the relay's thread, which takes microseconds


def notify(*lines: str) -> None:
    """Send lines such as `READY=1` to systemd; do nothing without `NOTIFY_SOCKET`."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where.startswith(("/", "@")):
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            line.sendto("\n".join(lines).encode(), address)
    except OSError:
        pass  # the service manager is gone, which does not matter by now


def notify_ready() -> None:
    """Tell systemd that this process serves now, even if another process did before."""
    notify(f"MAINPID={os.getpid()}", "READY=1", "STATUS=serving")


@contextmanager
def reloading() -> Iterator[None]:
    """Tell systemd that the configuration is being reloaded, and at the end of the block that the
    router is ready again.
    """
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        yield
    finally:
        notify("READY=1")


def watchdog_s() -> float | None:
    """Return for how many seconds systemd waits for a sign of life before it ends this process;
    None if it waits for ever.

    WATCHDOG_PID is the process that systemd started; a process that took over from it (`Successor`)
    has no watchdog.
    """
    wanted, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (wanted.isdecimal() and int(wanted)) or pid not in ("", str(os.getpid())):
        return None
    return int(wanted) / 1e6


class Pulse:
    """Shows that the router works, to systemd's watchdog and to probes of `/health`. Lifetime:
    process.

    Each beat takes one turn of the event loop and one of the relay's thread. If the event loop
    hangs, no beat is sent; if only the relay's thread hangs, `/health` says so.
    """

    def __init__(self, beat: Callable[[], Awaitable[None]], clock: Callable[[], float]) -> None:
        """Start without a beat. `beat` returns once the relay's thread has run a turn."""
        self._serves = False
        self._beat = beat
        self._clock = clock
        watched_s = watchdog_s()
        self._every_s = _BEAT_S if watched_s is None else min(watched_s / 2, _BEAT_S)
        self._asked_s = math.inf  # when the beat under way began

    def serve(self, serves: bool) -> None:
        """Send beats to systemd's watchdog from now on; or stop, if `serves` is False, because
        another process serves then.
        """
        self._serves = serves

    @property
    def serves(self) -> bool:
        """True if this process serves clients, and has not been replaced by another one."""
        return self._serves

    def hangs(self) -> str:
        """Return which part of the router hangs, for people; "" if none does."""
        return "the relay's thread hangs" if self._clock() - self._asked_s > _THREAD_S else ""

    async def run(self) -> None:
        """Send a beat at regular intervals until cancelled."""
        while True:
            self._asked_s = self._clock()
            await self._beat()
            self._asked_s = math.inf
            if self._serves:
                notify("WATCHDOG=1")
            await asyncio.sleep(self._every_s)

"""One instance as its supervisor sees it: started, serving, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

LINE_BYTES = 1 << 16  # of what an instance says; more in one line is cut


class Instance:
    """A process that serves. Lifetime: that process.

    It ends when this one does: it holds one end of a pipe, we the other.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline = -1

    async def start(self, arguments: Sequence[str]) -> None:
        """Start `serve` with these arguments. Raises OSError."""
        its, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command(arguments),
                "--lifeline",
                str(its),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(its,),
                limit=LINE_BYTES,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(its)

    @property
    def pid(self) -> int:
        """Its number with the system."""
        assert self._process is not None
        return self._process.pid

    async def ready_line(self) -> str | None:
        """What it says once it serves; None: it ended before."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b"ready "):
                return line.decode(errors="replace").strip()
        return None

    async def wait(self) -> int:
        """Its exit status, once it has ended; -N for signal N."""
        assert self._process is not None
        try:
            return await self._process.wait()
        finally:
            if self._process.returncode is not None and self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens where it has ended."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def command(arguments: Sequence[str]) -> list[str]:
    """`serve` as a program; what stands in the folder it is started in is none of our modules."""
    return [sys.executable, "-P", "-m", "engine", "serve", *arguments]


def end_with(lifeline: int) -> None:
    """In an instance: stop as by SIGTERM when the supervisor is gone, however it went."""

    def watch() -> None:
        with suppress(OSError):
            os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()

"""A process as its supervisor sees it: started, serving, ended."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from router.processes.ports import HeldPorts
from router.processes.seat import LEADER, Lifeline, Seat, hold


class Child:
    """Lifetime: process of its own. `on_words` is given what it says besides `ready`."""

    def __init__(self, number: int, on_words: Callable[[Child, list[str]], None]) -> None:
        self.number = number
        self.ready: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._on_words = on_words
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: Lifeline | None = None
        self.path: Path | None = None  # once it is started

    @property
    def pid(self) -> int:
        """Its number with the system."""
        assert self._process is not None
        return self._process.pid

    async def start(self, path: Path, ports: HeldPorts, argv: list[str]) -> None:
        """Start it: the leader listens at `path`, satellites connect there. Raises OSError."""
        self.path = path
        ours, its = socket.socketpair()
        with its:
            admin = ports.admin if self.number == LEADER else []
            numbers = ports.numbers
            seat = Seat(self.number, path, *numbers, its, ports.client[self.number], admin)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # what stands in the folder it is started in is none of our modules
                "-m",
                "router.processes",
                *seat.arguments(),
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=seat.files,
            )
        ours.setblocking(False)
        self._lifeline = await hold(ours, self._heard, lambda: None)

    async def wait(self) -> int:
        """Its exit status, once it has ended; -N for signal N."""
        assert self._process is not None
        status = await self._process.wait()
        if self._lifeline is not None:
            self._lifeline.close()
        if not self.ready.done():
            self.ready.cancel()
        return status

    async def until_ready(self) -> list[str] | None:
        """What it said when it was; None: it ended before."""
        ending = asyncio.create_task(self.wait())
        ends: list[asyncio.Future[Any]] = [ending, self.ready]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self.ready.done() and not self.ready.cancelled():
            ending.cancel()
            return self.ready.result()
        return None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens where it has ended."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def say(self, *words: object) -> None:
        """Tell it something over its lifeline."""
        if self._lifeline is not None:
            self._lifeline.say(*words)

    def _heard(self, words: list[str]) -> None:
        if words[:1] == ["ready"]:
            if not self.ready.done():
                self.ready.set_result(words[1:])
        else:
            self._on_words(self, words)

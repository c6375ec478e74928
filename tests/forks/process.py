"""A program that the fork server became, with what is used of `asyncio.subprocess.Process`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

NUMBER_BYTES = 32


class ForkedProcess:
    """It may be waited for in any event loop, any number of times. Lifetime: process.

    Where this object goes, so does the program: the server kills what nobody has a line to.
    """

    def __init__(self, line: socket.socket, pid: int) -> None:
        self.pid = pid
        self._line = line
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit status once it has ended, -N of signal N; None: it runs."""
        if self._returncode is None:
            try:
                told = self._line.recv(NUMBER_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            # A server that has ended without a word took it along.
            self._returncode = int(told) if told else -signal.SIGKILL
            self._line.close()
        return self._returncode

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        while (code := self.returncode) is None:
            await readable(self._line)
        return code

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError where it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def readable(line: socket.socket) -> None:
    """Returns when there is something to read, or nothing will come any more."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    file = os.dup(line.fileno())  # an event loop takes one reader of each file
    loop.add_reader(file, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(file)
        os.close(file)

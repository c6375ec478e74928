"""A program started by the fork server, with the part of the interface of
`asyncio.subprocess.Process` that tests use.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket

NUMBER_BYTES = 32


class ForkedProcess:
    """A forked program, for which any event loop may wait, any number of times. Lifetime: process.

    When this object is deleted, the program ends: the server kills programs whose connection is
    closed.
    """

    def __init__(self, line: socket.socket, pid: int) -> None:
        self.pid = pid
        self._line = line
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """The exit status once the program has ended, -N for signal N; None while it runs."""
        if self._returncode is None:
            try:
                told = self._line.recv(NUMBER_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            # If the server ended without a word, the program ended with it.
            self._returncode = int(told) if told else -signal.SIGKILL
            self._line.close()
        return self._returncode

    async def wait(self) -> int:
        """Wait until the program has ended; return its exit status."""
        while (code := self.returncode) is None:
            await readable(self._line)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the program. Raises ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def readable(line: socket.socket) -> None:
    """Wait until the socket has data or is closed."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    file = os.dup(line.fileno())  # an event loop takes one reader per file
    loop.add_reader(file, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(file)
        os.close(file)

"""A process that has imported what routers and simulated workers import, and forks to become them.

    python -P tests/forks/server.py FD [MODULE ...]

Each order over the socket FD brings a connection of its own and a file for the program's output.
The server sends the process id over the connection, then the exit status. If the other end closes
it, the server kills the program, and if FD is closed, all programs. So nothing outlives the tests.

With MODULEs, the server imports these instead: it also forks programs of other environments, whose
Python has nothing of ours. A fork has only one thread, so no module imported here may start one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from typing import Self

IMPORTED = (
    "encodings.idna",
    "engine.cli.main",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "policies.least_requests",
    "policies.warmset",
    "router.cli.main",
    "router.replicas.link",
    "router.replicas.sharing",
    "router.cli.serve",
)
ORDER_BYTES = 1 << 17  # at most
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, slots=True)
class Order:
    """A program that a fork is to become: `python -P -m module arguments`. Lifetime: one start."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str  # to run in

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(**json.loads(data))


class Server:
    """The fork server. Lifetime: process, in the parent; in a fork, until the fork becomes the
    program.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._lines: dict[int, tuple[socket.socket, int]] = {}  # by file: connection and process id
        self._ends: dict[int, tuple[socket.socket, int]] = {}  # by pidfd: the same

    def run(self) -> Order | None:
        """Serve orders. Returns None in the parent once the tests have ended, and in a fork the
        order to run.
        """
        while True:
            file, _ = self._poll.poll()[0]  # one event: it may close the next one's file
            if file in self._ends:
                self._ended(file)
            elif file in self._lines:
                self._deserted(file)
            else:
                data, files, _, _ = socket.recv_fds(self._control, ORDER_BYTES, 2)
                if not data:
                    return self._end()
                order = Order.decode(data)
                if self._fork(*files):
                    return order

    def _fork(self, line_file: int, sink: int) -> bool:
        """Fork; return True in the fork and False in the parent."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _stand_alone(sink, parent)
            return True
        os.close(sink)
        line = socket.socket(fileno=line_file)
        end = os.pidfd_open(pid)
        self._lines[line_file] = self._ends[end] = line, pid
        self._poll.register(line_file, select.POLLIN)
        self._poll.register(end, select.POLLIN)
        _say(line, pid)
        return False

    def _ended(self, end: int) -> None:
        line, pid = self._ends.pop(end)
        self._poll.unregister(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        if self._lines.pop(line.fileno(), None):
            self._poll.unregister(line)
        _say(line, os.waitstatus_to_exitcode(status))
        line.close()

    def _deserted(self, file: int) -> None:
        """Kill a program whose connection was closed, and the processes that it started."""
        _, pid = self._lines.pop(file)
        self._poll.unregister(file)
        for kill in (os.killpg, os.kill):  # the program may not have its own session yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        for file in list(self._lines):
            self._deserted(file)
        for end in list(self._ends):
            self._ended(end)


def _say(line: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # the tests have gone; `_deserted` handles that
        line.send(b"%d" % number)


def _stand_alone(sink: int, parent: int) -> None:
    """Make the fork like a newly started program, with its own session, three open files and
    nothing of the parent's.
    """
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for file, place in ((null, 0), (sink, 1), (sink, 2)):
        os.dup2(file, place)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def _become(order: Order) -> None:
    """Run the order as the main program, as `python -P -m` does."""
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv[1:] = order.arguments
    sys.orig_argv[1:] = ["-P", "-m", order.module, *order.arguments]
    importlib.invalidate_caches()
    gc.enable()
    # A router unfreezes at its end: it would look through all that was imported, and copy it.
    gc.freeze = gc.unfreeze = lambda: None
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def main() -> None:
    gc.disable()
    for name in sys.argv[2:] or IMPORTED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == threading.active_count() == 1, f"a fork would lose {threads}"
    gc.collect()
    gc.freeze()  # so that no collection in a fork copies these pages
    control = socket.socket(fileno=int(sys.argv[1]))
    order = Server(control).run()
    if order is not None:
        _become(order)


if __name__ == "__main__":
    main()

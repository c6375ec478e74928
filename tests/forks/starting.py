"""Starts of routers and timed workers, without their imports: two thirds of the CPU of a start.

A fork server is made by the first start that can do with one, and ends with the tests. There are
two, which a module's starts take in turn: what is forked of one has Python's hashes in common, and
a router must not agree with its peers by those.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from simulator import CHECKOUT
from simulator.live import processes
from tests.forks.process import NUMBER_BYTES, ForkedProcess, readable
from tests.forks.server import ORDER_BYTES, Order

SERVER = Path(__file__).with_name("server.py")
SERVERS = 2
SWITCH = "TEST_FORKS"  # in the environment, 0: each program is started as outside of tests
# Commands of the engine that compute: with torch, which has threads and so cannot be forked.
COMPUTING = ("serve", "make-tiny", "calibrate-kernels")
# Variables that are read before a program's own first line: those of a fork are its server's.
READ_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_")
USABLE = hasattr(os, "pidfd_open") and sys.platform == "linux" and os.environ.get(SWITCH) != "0"
_END_S = 30.0

really_start = processes.launch  # as outside of tests


class ForkServer:
    """A process that forks to become programs. Lifetime: test run.

    `python` and `modules`: the interpreter and what it imports, where they are not ours.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        python: str = sys.executable,
        modules: Sequence[str] = (),
    ) -> None:
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [python, "-P", str(SERVER), str(its.fileno()), *modules],
                cwd=CHECKOUT,
                env=environment,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    async def start(self, order: Order, sink: IO[bytes]) -> ForkedProcess:
        """Cancelled, it leaves no program behind. Raises ChildProcessError without a server."""
        data = order.encode()
        assert len(data) <= ORDER_BYTES, f"{order.module}: {len(data)} bytes to start it"
        line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as unless_started:
            unless_started.enter_context(line)
            with its:
                socket.send_fds(self._control, [data], [its.fileno(), sink.fileno()])
            await readable(line)
            pid = line.recv(NUMBER_BYTES)
            if not pid:
                raise ChildProcessError(f"the fork server ended: {self._process.wait(_END_S)}")
            unless_started.pop_all()
        return ForkedProcess(line, int(pid))

    def close(self) -> None:
        """What it started ends, too."""
        self._control.close()
        self._process.wait(_END_S)


class Forks:
    """`processes.launch` of tests. Lifetime: test run."""

    def __init__(self) -> None:
        self._environment = processes.environment()
        self._servers: list[ForkServer | None] = [None] * SERVERS
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(
            lambda: itertools.cycle(range(SERVERS))
        )

    async def launch(
        self, module: str, arguments: Sequence[str], sink: IO[bytes]
    ) -> processes.Process:
        """By a fork where that is the same as a start."""
        environment = processes.environment()
        if not self._same(module, arguments, environment):
            return await really_start(module, arguments, sink)
        order = Order(module, list(arguments), environment, os.getcwd())
        return await self._server(module).start(order, sink)

    def close(self) -> None:
        for server in self._servers:
            if server is not None:
                server.close()

    def _same(self, module: str, arguments: Sequence[str], now: Mapping[str, str]) -> bool:
        if module == "engine" and arguments[:1] and arguments[0] in COMPUTING:
            return False
        return module in ("router", "engine") and early(now) == early(self._environment)

    def _server(self, module: str) -> ForkServer:
        turn = next(self._turns[module])
        server = self._servers[turn]
        if server is None or server.ended:
            server = self._servers[turn] = ForkServer(self._environment)
        return server


@contextmanager
def forking() -> Iterator[None]:
    """Programs are forked meanwhile, where the system can; at the end none of them is left."""
    if not USABLE:
        yield
        return
    forks = Forks()
    processes.launch = forks.launch
    try:
        yield
    finally:
        processes.launch = really_start
        forks.close()


def early(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a fork cannot have anew."""
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}

"""Starts routers and simulated workers without their imports, which take two thirds of a start's
CPU time.

The first start that can use a fork server creates it, and it ends with the tests. There are two
servers, which a module's starts use in turn: programs forked from one server have the same Python
hash seed, and a router must not agree with its peers because of that.
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
# Variables that are read before a program's first line; a fork has its server's values.
READ_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_")
USABLE = hasattr(os, "pidfd_open") and sys.platform == "linux" and os.environ.get(SWITCH) != "0"
_END_S = 30.0

really_start = processes.launch  # as outside of tests


class ForkServer:
    """A process that forks to become programs. `python` and `modules` set another interpreter and
    imports.

    Lifetime: test run.
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
        """Start a program; cancelling the call leaves no program behind. Raises ChildProcessError
        if the server is gone.
        """
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
        """End the server and all programs that it started."""
        self._control.close()
        self._process.wait(_END_S)


class Forks:
    """Replaces `processes.launch` in tests by forks. Lifetime: test run."""

    def __init__(self) -> None:
        self._environment = processes.environment()
        self._servers: list[ForkServer | None] = [None] * SERVERS
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(
            lambda: itertools.cycle(range(SERVERS))
        )

    async def launch(
        self, module: str, arguments: Sequence[str], sink: IO[bytes]
    ) -> processes.Process:
        """Start a program, by a fork if that is equivalent to a normal start."""
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
    """Start programs by forks during the block, if the system supports that; none is left at the
    end.
    """
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
    """Return the variables that take effect only at a process's start, so that a fork cannot change
    them.
    """
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}

"""Starts programs, waits for the ready line of each, and ends all of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from simulator import CHECKOUT

POLL_S = 0.02  # between looks at a starting program's log
TAIL_LINES = 15


class StartError(RuntimeError):
    """Raised if a program did not start or died; the message has the end of its log."""


class Process(Protocol):
    """The interface to a running program that this package uses, a part of
    `asyncio.subprocess.Process`.
    """

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is running, and the facts in its ready line. Lifetime: process."""

    name: str
    process: Process
    log: Path
    url: str  # where it serves
    facts: Mapping[str, str]  # the ready line's key=value pairs

    def check(self) -> None:
        """Raise `StartError` if the program has ended."""
        if self.process.returncode is not None:
            raise _died(self.name, self.process.returncode, self.log)


class Programs:
    """Programs that are started together and ended together. Lifetime: the `async with` block.

    Each program has a session of its own, so that Ctrl-C reaches this process alone, and this class
    decides the order in which programs end. At the end of the block it sends SIGTERM to all of
    them, waits, then kills those that are left.
    """

    def __init__(self, log_dir: Path, start_s: float = 60.0, grace_s: float = 5.0) -> None:
        self.log_dir = log_dir
        self.start_s = start_s
        self.grace_s = grace_s
        self._started: list[Process] = []

    async def __aenter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reaping = asyncio.ensure_future(self._reap())
        try:
            await asyncio.shield(reaping)
        except asyncio.CancelledError:
            # A second Ctrl-C: programs are killed without a clean end, but none stays behind.
            for process in self._started:
                _signal(process, signal.SIGKILL)
            raise

    async def start(self, name: str, module: str, arguments: Sequence[str]) -> Program:
        """Start `python -m module arguments` and wait for its line `ready URL key=value ...`.

        Raises `StartError` if the program ends, or prints no such line within `start_s` seconds.
        """
        log = self.log_dir / f"{name}.log"
        with log.open("wb") as sink:
            process = await launch(module, arguments, sink)
        self._started.append(process)
        line = await self._ready_line(name, process, log)
        url, facts = parse_ready(line)
        return Program(name, process, log, url, facts)

    async def _ready_line(self, name: str, process: Process, log: Path) -> str:
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + self.start_s
        while True:
            # Checked before the log is read, so that a line written just before the end counts.
            ended, late = process.returncode, clock() > deadline_s
            for line in _lines(log):
                if line.startswith("ready http"):
                    return line
            if ended is not None:
                raise _died(name, ended, log)
            if late:
                raise StartError(f"{name} not ready after {self.start_s:g} s\n{log_tail(log)}")
            await asyncio.sleep(POLL_S)

    async def _reap(self) -> None:
        for process in self._started:
            _signal(process, signal.SIGTERM)
        waits = [asyncio.create_task(process.wait()) for process in self._started]
        if not waits:
            return
        _, pending = await asyncio.wait(waits, timeout=self.grace_s)
        if pending:
            for process in self._started:
                _signal(process, signal.SIGKILL)
            await asyncio.wait(pending)
        self._started.clear()


async def launch(module: str, arguments: Sequence[str], sink: IO[bytes]) -> Process:
    """Start `python -m module arguments` in a session of its own; its output is written to `sink`.

    All programs start here, so that tests can replace this function by a cheaper one
    (`tests/forks`).
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # do not import modules from the current folder
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sink,
        stderr=sink,
        env=environment(),
        start_new_session=True,
    )


def environment() -> dict[str, str]:
    """Return the environment variables for a program: those of this process, with the checkout on
    the path, and one thread for each numeric library.
    """
    paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def check_port(port: int, option: str) -> None:
    """Raise `StartError` if nobody can listen on loopback at `port`, which the user gave with
    `option`.
    """
    with socket.socket() as probe:
        # As servers do, so that a port whose last connections linger counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StartError(
                f"port {port} of 127.0.0.1: {error.strerror}; choose another with {option} PORT "
                f"({option} 0: any that is free)"
            ) from error


def parse_ready(line: str) -> tuple[str, dict[str, str]]:
    """Return the URL and the key=value pairs of a ready line. Raises `StartError` for any other
    line.
    """
    match = re.match(r"ready (https?://\S+)((?: \S+=\S*)*)", line)
    if match is None:
        raise StartError(f"not a ready line: {line!r}")
    pairs = (pair.partition("=") for pair in match[2].split())
    return match[1].rstrip("/"), {key: value for key, _, value in pairs}


def log_tail(log: Path) -> str:
    """Return the last lines of a log, to be shown to a person."""
    lines = _lines(log)[-TAIL_LINES:]
    return "\n".join([f"--- {log} ---", *lines, "---"])


def _lines(log: Path) -> list[str]:
    text = log.read_text(errors="replace")
    # A line that is still being written has no end yet and is left for the next look.
    return text[: text.rfind("\n") + 1].splitlines()


def _died(name: str, code: int, log: Path) -> StartError:
    return StartError(f"{name} ended with status {code}\n{log_tail(log)}")


def _signal(process: Process, number: signal.Signals) -> None:
    if process.returncode is None:
        process.send_signal(number)

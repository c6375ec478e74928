"""`serve --instances N`: starts N workers that share one device, and restarts those that end.

The supervisor serves no requests. A process that ends before the others start measures once what
the model needs: memory that each of them found free would be counted N times.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import msgspec

from engine.capacity import Measured, share_out

MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Addresses:
    """The ports of one instance; the system chooses a port that is 0. Lifetime: until the first
    instance serves.
    """

    port: int
    events_port: int
    replay_port: int

    def flags(self) -> list[str]:
        """Return the ports as flags of `serve`."""
        ports = (self.port, self.events_port, self.replay_port)
        names = ("--port", "--events-port", "--replay-port")
        return [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]

    def settled(self, ready: str) -> Addresses:
        """Return the ports that the system chose, as the instance's ready line `ready` names them,
        so that a restarted instance gets the same ports. Raises ValueError for a line without
        ports.
        """
        found = re.match(
            r"ready https?://\S+:(\d+) .*\bevents=tcp://\S+:(\d+) replay=tcp://\S+:(\d+)\b", ready
        )
        if found is None:
            raise ValueError(f"not a ready line: {ready[:200]!r}")
        return Addresses(*map(int, found.groups()))


def addresses_of(instances: int, port: int, events_port: int, replay_port: int) -> list[Addresses]:
    """Return the ports of each instance. Raises ValueError if ports overlap or are out of range."""
    first = {"--port": port, "--events-port": events_port, "--replay-port": replay_port}
    taken = {name: at for name, at in first.items() if at}
    for name, at in taken.items():
        if not 0 < at <= MAX_PORT - instances + 1:
            raise ValueError(f"{name} {at}: {instances} ports from there on are not all 1..65535")
    for (name, at), (other, beside) in combinations(taken.items(), 2):
        if abs(at - beside) < instances:
            raise ValueError(
                f"{instances} instances take {instances} ports from {name} {at} on and as many "
                f"from {other} {beside} on: they overlap"
            )
    return [
        Addresses(*(at + number if at else 0 for at in (port, events_port, replay_port)))
        for number in range(instances)
    ]


LINE_BYTES = 1 << 16  # of an instance's output; a longer line is cut


class Instance:
    """The process of one `serve` command. Lifetime: that process. The process ends when the
    supervisor ends, because each of them holds one end of a pipe.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline = -1

    async def start(self, arguments: Sequence[str]) -> None:
        """Start the process `serve` with these arguments. Raises OSError if it cannot be
        started.
        """
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
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    async def ready_line(self) -> str | None:
        """Return the line that the process prints once it serves, or None if the process ends
        before.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b"ready "):
                return line.decode(errors="replace").strip()
        return None

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit status, which is -N after
        signal N.
        """
        assert self._process is not None
        try:
            return await self._process.wait()
        finally:
            if self._process.returncode is not None and self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal; do nothing if it has ended."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of `serve`, in a form in which Python imports no modules from the
    current folder.
    """
    return [sys.executable, "-P", "-m", "engine", "serve", *arguments]


def end_with(lifeline: int) -> None:
    """Stop this instance, as SIGTERM would, when the supervisor is gone for whatever reason.
    `lifeline` is the instance's end of the pipe.
    """

    def watch() -> None:
        with suppress(OSError):
            os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


BACK_OFF_S = 0.5  # before the second start in a row; doubles
BACK_OFF_MAX_S = 30.0
PROVEN_S = 60.0  # an instance that ran for this long is restarted at once
END_S = 10.0  # beyond the grace that instances give their requests

log = logging.getLogger(__name__)


def supervise(
    arguments: Sequence[str],
    addresses: Sequence[Addresses],
    memory_bytes: int | None,
    grace_s: float,
) -> int:
    """Run instances until SIGTERM or SIGINT; return the exit code: 0, or that of an instance that
    cannot start.

    `arguments` are the arguments of one `serve`; `memory_bytes` is the memory for all instances
    together, and None means all memory of the device. Raises CapacityError if a share is too small
    for one request, OSError if no process starts.
    """
    return asyncio.run(Supervisor(arguments, addresses, memory_bytes, grace_s).run())


class Supervisor:
    """Starts instances and restarts those that end. Lifetime: process."""

    def __init__(
        self,
        arguments: Sequence[str],
        addresses: Sequence[Addresses],
        memory_bytes: int | None,
        grace_s: float,
    ) -> None:
        self._arguments = list(arguments)
        self._addresses = list(addresses)
        self._memory_bytes = memory_bytes
        self._within_s = grace_s + END_S
        self._running: set[Instance] = set()
        self._stop = asyncio.Event()
        self._failed = 0  # exit code of an instance that never served

    async def run(self) -> int:
        """Run the instances until a signal comes; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            measured = await self._measured(stopping)
            if isinstance(measured, int):
                return measured
            shares = share_out(measured, len(self._addresses), self._memory_bytes)
            print(shares.report(), file=sys.stderr)
            if shares.capacity.warning:
                print(f"warning: in each, {shares.capacity.warning}", file=sys.stderr)
            self._arguments += ["--memory-bytes", str(shares.each_bytes)]
            keepers = [
                asyncio.create_task(self._keep(number)) for number in range(len(self._addresses))
            ]
            await asyncio.wait([stopping, *keepers], return_when=asyncio.FIRST_COMPLETED)
            await self._end_all(keepers)
            for keeper in keepers:
                keeper.result()
        finally:
            stopping.cancel()
        return self._failed

    async def _measured(self, stopping: asyncio.Task[bool]) -> Measured | int:
        """Return the measured needs of an instance, or an exit code if the measuring process could
        not start.
        """
        process = await asyncio.create_subprocess_exec(
            *command([*self._arguments, "--measure"]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        measuring = asyncio.create_task(process.communicate())
        await asyncio.wait([stopping, measuring], return_when=asyncio.FIRST_COMPLETED)
        if not measuring.done():
            process.kill()
            await measuring
            return 0
        output, _ = measuring.result()
        if process.returncode:
            return 1 if process.returncode < 0 else process.returncode
        return msgspec.json.decode(output, type=Measured)

    async def _keep(self, number: int) -> None:
        """Keep one instance running at its ports; return if it cannot start at all."""
        back_off = BackOff(asyncio.get_running_loop().time)
        served = False
        while not self._stop.is_set():
            instance = Instance()
            await instance.start([*self._arguments, *self._addresses[number].flags()])
            self._running.add(instance)
            if self._stop.is_set():
                instance.signal(signal.SIGTERM)
            line = await instance.ready_line()
            if line is not None:
                served = True
                self._addresses[number] = self._addresses[number].settled(line)
                position = f"instance={number + 1}/{len(self._addresses)}"
                print(f"{line} {position} pid={instance.pid}", flush=True)
            status = await instance.wait()
            self._running.discard(instance)
            if self._stop.is_set():
                return
            if not served:
                self._failed = status if status > 0 else 1
                return
            wait_s = back_off.next_s()
            log.error(
                "instance %d ended with status %d; a new one starts in %.1f s",
                *(number + 1, status, wait_s),
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)

    def _on_signal(self) -> None:
        if self._stop.is_set():  # a second signal: instances end their grace
            self._signal_all(signal.SIGTERM)
        self._stop.set()

    def _signal_all(self, number: signal.Signals) -> None:
        for instance in self._running:
            instance.signal(number)

    async def _end_all(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Ask all instances to end, and kill those that do not."""
        self._stop.set()
        self._signal_all(signal.SIGTERM)
        _, late = await asyncio.wait(keepers, timeout=self._within_s)
        if late:
            log.error("%d instances did not end in %g s: killed", len(late), self._within_s)
            self._signal_all(signal.SIGKILL)
            await asyncio.wait(late)


class BackOff:
    """The pause before an ended instance is started again. Lifetime: as long as the instance's
    ports are used.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wait_s = 0.0
        self._since_s = clock()

    def next_s(self) -> float:
        """Return the pause in seconds: 0 if the instance had served for long, else twice the last
        pause.
        """
        if self._clock() - self._since_s > PROVEN_S:
            self._wait_s = 0.0
        wait_s, self._wait_s = self._wait_s, min(max(2 * self._wait_s, BACK_OFF_S), BACK_OFF_MAX_S)
        self._since_s = self._clock() + wait_s
        return wait_s

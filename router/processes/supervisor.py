"""The process that was started: starts the leader and its satellites, and anew what ends.

It serves nobody and knows nothing of requests. A satellite that ends is replaced. Where the
leader ends, a new one with new satellites takes over at once: those of before finish the answers
they carry, and then end. Whoever ends again and again is started ever more rarely.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec

from router.config.schema import Config
from router.processes.child import Child
from router.processes.ports import HeldPorts, hold_ports
from router.processes.seat import LEADER
from router.takeover.estate import Estate
from router.takeover.handing import Handing, Left
from router.takeover.notices import notify, notify_ready
from router.takeover.successor import Successor
from router.takeover.taking import Inheritance

log = logging.getLogger(__name__)

_BACK_OFF_S = 0.5  # before the second start in a row; doubles
_BACK_OFF_MAX_S = 30.0
_PROVEN_S = 60.0  # who served for so long is started at once again
_LEAVE_S = 30.0  # for the leader to write down what it knows
_GRACE_S = 10.0  # beyond the time that requests get at shutdown


def supervise(config: Config, argv: list[str], before: Inheritance | None = None) -> int:
    """Run the router until SIGTERM or SIGINT; `argv` are the command's. Returns its status.

    `before`: what a router before this one left. Raises OSError.
    """
    ports = hold_ports(config, before)
    with closing(ports), tempfile.TemporaryDirectory(prefix="warmroute-") as folder:
        return asyncio.run(Supervisor(config, argv, Path(folder), ports, before).run())


class Supervisor:
    """Lifetime: process."""

    def __init__(
        self,
        config: Config,
        argv: list[str],
        folder: Path,
        ports: HeldPorts,
        before: Inheritance | None,
    ) -> None:
        """`folder` is nobody else's to enter."""
        self._config = config
        self._argv = argv
        self._folder = folder
        self._ports = ports
        self._before = before
        self._successor = Successor(argv, config.takeover)
        self._handing: Handing | None = None
        self._left = asyncio.Event()  # the leader has written down what it leaves
        self._handed = False  # another router serves in our place
        self._children: set[Child] = set()
        self._leader: Child | None = None
        self._stop = asyncio.Event()
        self._restarts = {"satellites": 0, "leaders": 0}
        self._generations = 0
        self._announced = False

    async def run(self) -> int:
        """Until told to stop; the leader's status where it cannot start at all."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(signal.SIGUSR2, self._successor.start)
        stopping = asyncio.create_task(self._stop.wait())
        leading = asyncio.create_task(self._lead())
        await asyncio.wait([stopping, leading], return_when=asyncio.FIRST_COMPLETED)
        self._stop.set()
        stopping.cancel()
        await self._end_all()
        if self._handing is not None:
            await self._handing.aclose()
        return await leading

    async def _lead(self) -> int:
        """One leader after the other; the status of one that cannot start."""
        back_off = BackOff()
        while True:
            path = self._folder / f"{self._generations}.sock"
            self._generations += 1
            former = set(self._children)
            if self._before is not None and not self._announced:
                _estate_of(path).write_bytes(msgspec.json.encode(self._before.estate))
            leader = await self._started(LEADER, path)
            self._leader = leader
            urls = await leader.until_ready()
            keepers: list[asyncio.Task[None]] = []
            if urls is not None:
                numbers = range(1, self._config.processes)
                keepers = [asyncio.create_task(self._keep(n, path)) for n in numbers]
                handing = asyncio.create_task(self._hand_over(path, urls, former))
                keepers.append(handing)
            status = await self._ended(leader)
            for keeper in keepers:
                keeper.cancel()
            if keepers:
                await asyncio.wait(keepers)
            if self._stop.is_set():
                return 0
            if not self._announced:
                return status or 1
            log.error("the leader ended with status %d; a new one is started", status)
            self._restarts["leaders"] += 1
            await self._pause(back_off, LEADER)

    async def _keep(self, number: int, path: Path) -> None:
        """A satellite at this seat, always, as long as its leader is there."""
        back_off = BackOff()
        while True:
            satellite = await self._started(number, path)
            status = await self._ended(satellite)
            if self._stop.is_set():
                return
            log.error("satellite %d ended with status %d; a new one is started", number, status)
            self._restarts["satellites"] += 1
            self._tell_restarts()
            await self._pause(back_off, number)

    async def _hand_over(self, path: Path, urls: list[str], former: set[Child]) -> None:
        """Once those of a new leader serve, the ones of before may go; the first time, say so."""
        serving = [c for c in self._children if c not in former]
        while len(serving) < self._config.processes:
            await asyncio.sleep(0.01)
            serving = [c for c in self._children if c not in former]
        await asyncio.wait([child.ready for child in serving])
        for child in former:
            child.signal(signal.SIGTERM)
        self._tell_restarts()
        if not self._announced:
            self._announced = True
            await self._announce(*urls)

    async def _announce(self, client: str, admin: str) -> None:
        """All serve for the first time."""
        if self._before is not None:
            await self._before.serving()
        if (path := self._config.takeover) is not None:
            self._handing = Handing(Path(path), self._leave, self._hand_over_to_another)
            self._handing.start()
        notify_ready()
        print(f"ready {client} admin={admin} processes={self._config.processes}", flush=True)

    async def _leave(self) -> Left:
        """What a router that follows gets. Raises OSError while there is no leader to ask."""
        leader = self._leader
        if leader is None or leader.path is None:
            raise OSError("there is no leader")
        self._left.clear()
        leader.say("leave")
        async with asyncio.timeout(_LEAVE_S):
            await self._left.wait()
        estate = msgspec.json.decode(leader.path.with_suffix(".left").read_bytes(), type=Estate)
        ports = self._ports
        clients = ports.all_of_clients()
        return Left(clients, ports.admin, estate.added, estate.workers, estate.found)

    async def _hand_over_to_another(self) -> None:
        self._handed = True
        for child in self._children:
            child.say("succeeded")
        self._stop.set()

    async def _pause(self, back_off: BackOff, number: int) -> None:
        """Before the process of this seat is started anew."""
        if back_off.due_s and not any(child.number == number for child in self._children):
            self._ports.rest(number)
        await back_off.wait()

    async def _started(self, number: int, path: Path) -> Child:
        child = Child(number, self._heard)
        await child.start(path, self._ports, self._argv)
        self._children.add(child)
        if self._stop.is_set():
            child.signal(signal.SIGTERM)
        return child

    async def _ended(self, child: Child) -> int:
        status = await child.wait()
        self._children.discard(child)
        return status

    def _heard(self, child: Child, words: list[str]) -> None:
        """A leader gave up a satellite that hangs: it takes connections, and answers nobody."""
        if len(words) == 2 and words[0] == "hung":
            for other in self._children:
                if str(other.pid) == words[1]:
                    log.error("satellite %d hangs; it is killed", other.number)
                    other.signal(signal.SIGKILL)
        elif words == ["left"]:
            self._left.set()

    def _tell_restarts(self) -> None:
        if self._leader is not None:
            self._leader.say("restarts", self._restarts["satellites"], self._restarts["leaders"])

    def _reload(self) -> None:
        if self._leader is not None:
            self._leader.signal(signal.SIGHUP)

    async def _end_all(self) -> None:
        """Let all end in good order, and kill what does not."""
        self._ports.close()
        if not self._handed:
            notify("STOPPING=1")
            for child in self._children:
                child.signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.wait()) for child in self._children]
        if not waits:
            return
        times = 3 if self._handed else 1  # connections may be used once more
        within_s = times * self._config.timeouts.shutdown_s + _GRACE_S
        _, late = await asyncio.wait(waits, timeout=within_s)
        if late:
            log.error("%d processes did not end within %g s; they are killed", len(late), within_s)
            for child in self._children:
                child.signal(signal.SIGKILL)
            await asyncio.wait(late)


class BackOff:
    """How long to wait before who ended is started anew. Lifetime: seat."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._next_s = 0.0
        self._since_s = self._clock()

    @property
    def due_s(self) -> float:
        """How long it would be now."""
        return 0.0 if self._clock() - self._since_s > _PROVEN_S else self._next_s

    async def wait(self) -> None:
        """Not at all after long service; else twice as long as the last time."""
        self._next_s = self.due_s
        await asyncio.sleep(self._next_s)
        self._next_s = min(max(2 * self._next_s, _BACK_OFF_S), _BACK_OFF_MAX_S)
        self._since_s = self._clock()


def _estate_of(path: Path) -> Path:
    """Where the leader that listens at `path` looks for what a router before left."""
    return path.with_suffix(".estate")

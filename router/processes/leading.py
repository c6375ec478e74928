"""The leader's end: satellites bring their requests before its desk."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from router.config.schema import Config
from router.http.local_desk import LocalDesk
from router.keys.grant import Grant
from router.keys.ring import KeyRing
from router.processes.attendant import Attendant
from router.processes.messages import REQUEST_IDS_BITS, Joined, Settings, View, Welcome
from router.processes.metrics import ProcessCollector
from router.processes.seat import Lifeline, Seat, hold
from router.processes.tally import Tally
from router.processes.usage import Usage, used_here
from router.processes.view import view_of

if TYPE_CHECKING:
    from router.assembly import Router

log = logging.getLogger(__name__)

_LOOK_S = 0.05  # between two looks whether the fleet changed
_SILENT_S = 10.0  # a satellite that says nothing for so long is given up
_MOST_SERIALS = 1 << 16  # satellites of one leader: more than 2^52 numbers JSON cannot tell apart


class Testator(Protocol):
    """Who leaves what the leader has to a router that follows."""

    async def leave_in(self, path: Path) -> None:
        """Save what is known, and say in a file what else there is."""
        ...

    async def hand_over(self) -> None:
        """The other one serves: accept nothing more, and end when all is answered."""
        ...


@dataclass(slots=True)
class Restarts:
    """How often the supervisor started one anew. Lifetime: process."""

    satellites: int = 0
    leaders: int = 0


class Leading:
    """Lifetime: process; `start` and `aclose` once each."""

    def __init__(
        self,
        desk: LocalDesk,
        config: Callable[[], Config],
        seat: Seat,
        testator: Testator,
        keys: KeyRing | None = None,
    ) -> None:
        """`keys` are clients' API keys, whose use is counted here for all processes."""
        self._desk = desk
        self._config = config
        self._seat = seat
        self._keys = keys
        self._testator = testator
        self._succession: asyncio.Task[None] | None = None
        self.tally = Tally()
        self._lines: set[Attendant] = set()
        self._serials = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._looking: asyncio.Task[None] | None = None
        self._all_left = asyncio.Event()
        self._all_left.set()
        self._view: View | None = None
        self._told: Config | None = None
        self.lifeline: Lifeline | None = None  # to the supervisor
        self.restarts = Restarts()
        self.lost_lines = 0  # that ended with requests open

    async def start(self) -> None:
        """Let satellites come. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._attend, str(self._seat.path))
        self._looking = asyncio.create_task(self._look(), name="fleet view")

    async def drain(self, within_s: float) -> None:
        """Wait until the satellites have left; those that have not by then are cut off."""
        try:
            async with asyncio.timeout(within_s):
                await self._all_left.wait()
        except TimeoutError:
            log.warning("%d satellites still run at the end", len(self._lines))

    async def aclose(self) -> None:
        """Let nobody in, and cut off who is there."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        if self._server is not None:
            self._server.close()
        for attendant in tuple(self._lines):
            attendant.line.close("the leader ends")
        await self._all_left.wait()
        if self._server is not None:
            await self._server.wait_closed()

    def usages(self) -> Iterable[tuple[int, str, Usage]]:
        """Seat, role and use of each process that is there."""
        yield self._seat.number, "leader", used_here()
        for attendant in sorted(self._lines, key=lambda one: one.seat):
            if attendant.usage is not None:
                yield attendant.seat, "satellite", attendant.usage

    async def end(self) -> None:
        """Let satellites finish what they have, for as long as the configuration says."""
        await self.drain(self._config().timeouts.shutdown_s)
        await self.aclose()

    def words(self, words: list[str]) -> None:
        """The supervisor says something."""
        if len(words) == 3 and words[0] == "restarts":
            self.restarts = Restarts(int(words[1]), int(words[2]))
        elif words == ["leave"]:
            self._succession = asyncio.create_task(self._leave())
        elif words == ["succeeded"]:
            self._succession = asyncio.create_task(self._testator.hand_over())

    async def _leave(self) -> None:
        await self._testator.leave_in(self._seat.left)
        if self.lifeline is not None:
            self.lifeline.say("left")

    # --- for attendants -----------------------------------------------------------------------

    def welcome(self, joined: Joined) -> Welcome | None:
        """The answer to a satellite that came; None where there is no place for it."""
        serial = next(self._serials)
        if serial >= _MOST_SERIALS:
            return None
        log.info("satellite %d joined, process %d", joined.seat, joined.pid)
        self._view = self._view or view_of(self._desk)
        secret = None if self._keys is None else self._keys.secret
        return Welcome(serial << REQUEST_IDS_BITS, self._config(), self._view, secret)

    def grant(self, whose: bytes) -> Grant | None:
        """For a satellite's request of that key; None: nothing is counted of it."""
        return self._keys.grant(whose) if whose and self._keys is not None else None

    def left(self, attendant: Attendant, why: str, open_requests: int) -> None:
        """A line is gone, its requests are ended."""
        self.tally.retire(attendant)
        self._lines.discard(attendant)
        if not self._lines:
            self._all_left.set()
        if open_requests:
            self.lost_lines += 1
        level = logging.WARNING if open_requests else logging.INFO
        log.log(
            level,
            "satellite %d left (%s); %d requests of it were open",
            attendant.seat,
            why,
            open_requests,
        )

    def _attend(self) -> asyncio.BaseProtocol:
        attendant = Attendant(self._desk, self)
        self._lines.add(attendant)
        self._all_left.clear()
        return attendant.line

    async def _look(self) -> None:
        """Tell everybody of changes; give up who is silent."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            view, config = view_of(self._desk), self._config()
            if view != self._view:
                self._view = view
                self._tell(view)
            if config is not self._told:
                if self._told is not None:
                    self._tell(Settings(config))
                self._told = config
            for attendant in tuple(self._lines):
                if loop.time() - attendant.heard_s > _SILENT_S:
                    attendant.line.close(f"silent for {_SILENT_S:g} s")
                    if self.lifeline is not None and attendant.pid is not None:
                        self.lifeline.say("hung", attendant.pid)

    def _tell(self, message: View | Settings) -> None:
        for attendant in self._lines:
            if attendant.pid is not None:  # else `Welcome` will tell
                attendant.line.say(message)


async def lead(
    router: Router,
    seat: Seat,
    urls: tuple[str, str],
    stop: Callable[[], None],
    testator: Testator,
) -> Leading:
    """Let satellites come to `router`, and say so: it serves at `urls`, of clients and admin.

    `stop` is called when the supervisor is gone, `testator` when another router is to follow.
    Raises OSError.
    """
    leading = Leading(router.desk, lambda: router.config, seat, testator, router.api_keys)
    await leading.start()
    router.metrics.register(ProcessCollector(leading))
    router.metrics.others = leading.tally.added_to
    leading.lifeline = await hold(seat.lifeline, leading.words, stop)
    leading.lifeline.say("ready", *urls)
    return leading

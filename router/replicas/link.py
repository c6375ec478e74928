"""The link to Redis: kept up, and taken up again, for as long as the router runs."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from redis.exceptions import RedisError

from router.config.schema import Config
from router.replicas.agreement import ReplicaRefusedError, differences, refusal
from router.replicas.connected import Connected
from router.replicas.exchange import Exchange
from router.replicas.identity import Keys, name_of
from router.replicas.lease import Leases
from router.replicas.place import Place
from router.replicas.redis_url import RedisUrl, parse_redis_url
from router.replicas.redis_wire import ANSWER_S, Wire, checked, open_wire
from router.replicas.roll import FIELDS, Entry, Roll, read_entries
from router.replicas.trouble import reason_of

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5  # between attempts to connect
_PROVEN_S = 5.0  # up for so long: the next attempt comes soon again
_GOODBYE_S = 1.0
_LOOK_S = 0.1  # between looks whether somebody is alive who differs


class Link:
    """Lifetime: process; `agree`, `start` and `aclose` once each, in this order."""

    def __init__(
        self, config: Config, identity: str, exchange: Exchange, terms: Mapping[str, str]
    ) -> None:
        """`config.state` is given. `identity`: of `new_identity`; `terms`: of `terms_of`."""
        assert config.state is not None
        replicas = config.replicas
        keys = Keys(replicas.fleet)
        self.url = parse_redis_url(config.state)
        self.place = Place(
            identity,
            keys,
            exchange,
            Roll(identity, replicas.lease_s),
            Leases(keys, identity, replicas.lease_s, time.monotonic, _call_at),
            terms,
            replicas.flush_s,
            replicas.lease_s,
            time.monotonic,
        )
        self.up = False
        self.down_since_s: float | None = time.monotonic()  # None: it is up
        self._running: asyncio.Task[None] | None = None
        self._complaints: set[str] = set()  # since it was up last
        self._attempts = 0
        self._moved = asyncio.Event()  # to another URL, since we began to connect

    @property
    def stale_s(self) -> float:
        """For how long nothing was heard of anybody; 0: the link is up."""
        return 0.0 if self.down_since_s is None else self.place.clock() - self.down_since_s

    async def agree(self) -> None:
        """Look whether somebody runs who differs in what must be alike.

        Raises ReplicaRefusedError. Where Redis cannot be asked that is no obstacle: it is told.
        """
        wire: Wire | None = None
        try:
            wire = await open_wire(self.url, self.place.keys.replicas, ANSWER_S)
            await self._look_for_others(wire)
        except ReplicaRefusedError:
            raise
        except Exception as error:  # noqa: BLE001 - told by name, and tried again
            self._complain(error)
        finally:
            if wire is not None:
                await wire.aclose()

    def start(self) -> None:
        """Be there, as soon as Redis is."""
        self._running = asyncio.create_task(self._run(), name="link to replicas")

    async def aclose(self) -> None:
        """Say goodbye, within a second."""
        if self._running is None:
            return
        self.place.leaving = True
        if self.up:
            await asyncio.wait([self._running], timeout=_GOODBYE_S)
        self._running.cancel()
        await asyncio.wait([self._running])

    def renew(self, terms: Mapping[str, str], url: RedisUrl) -> None:
        """The configuration was read anew; peers look at it from now on.

        Another URL, or another password in it, is connected to at once.
        """
        self.place.terms = terms
        if url != self.url:
            self.url = url
            self._complaints.clear()
            self._moved.set()

    # --- inside -------------------------------------------------------------------------------

    async def _look_for_others(self, wire: Wire) -> None:
        place = self.place
        first = await self._others(wire)
        suspects = {name: entry for name, entry in first.items() if self._differs(entry)}
        until_s = place.clock() + place.lease_s
        while suspects and place.clock() < until_s:  # whether its beat goes on
            await asyncio.sleep(_LOOK_S)
            now = await self._others(wire)
            for name, entry in suspects.items():
                if name in now and now[name].beat != entry.beat and self._differs(now[name]):
                    raise refusal(name, self._differs(now[name]))
            suspects = {name: entry for name, entry in suspects.items() if name in now}

    async def _others(self, wire: Wire) -> dict[str, Entry]:
        """Those of another name: one of ours is the router before this one, which leaves."""
        command = ("HSCAN", self.place.keys.replicas, 0, "COUNT", FIELDS)
        (reply,) = checked(await wire.call([command], ANSWER_S))
        entries, _ = read_entries(reply[1])
        ours = name_of(self.place.me)
        return {name: entry for name, entry in entries.items() if name_of(name) != ours}

    def _differs(self, entry: Entry) -> str:
        return "; ".join(text for _, text in differences(self.place.terms, entry.terms))

    async def _run(self) -> None:
        place = self.place
        while not place.leaving:
            begun_s = place.clock()
            try:
                await self._stretch()
            except Exception as error:  # noqa: BLE001 - told by name, and tried again
                self._complain(error)
            self._part()
            if place.clock() - begun_s > _PROVEN_S:
                self._attempts = 0
            if not place.leaving:
                await asyncio.sleep(self._pause_s())

    async def _stretch(self) -> None:
        """From one connection to its loss, to another URL, or to our leaving."""
        place = self.place
        self._moved.clear()
        async with _Wires(self) as (telling, hearing):
            connected = Connected(place, telling, hearing)
            await connected.join()
            self._joined()
            work = connected.tell(), connected.hear(), self._until_moved()
            tasks = [asyncio.create_task(each) for each in work]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error

    async def _until_moved(self) -> None:
        await self._moved.wait()

    def _joined(self) -> None:
        place = self.place
        self.up, self.down_since_s = True, None
        self._complaints.clear()
        place.counters.reconnects += 1
        fleet = place.keys.fleet
        log.info("shares state as %s of fleet %s at %s", place.me, fleet, self.url)

    def _part(self) -> None:
        place = self.place
        if self.up:
            self.up, self.down_since_s = False, place.clock()
            place.exchange.parted(place.clock())

    def _pause_s(self) -> float:
        longest_s = min(_FIRST_PAUSE_S * 2**self._attempts, _LONGEST_PAUSE_S)
        self._attempts = min(self._attempts + 1, 16)
        return random.uniform(longest_s / 2, longest_s)

    def _complain(self, error: Exception) -> None:
        """Each reason once, until the link is up again."""
        reason = reason_of(error)
        if reason in self._complaints or self.place.leaving:
            return
        self._complaints.add(reason)
        trace = None if isinstance(error, (RedisError, OSError)) else error
        log.error(
            "state: %s %s; this router goes on with what it knows, and tries again",
            self.url,
            reason,
            exc_info=trace,
        )


def _call_at(when_s: float, ring: Callable[[], None]) -> asyncio.TimerHandle:
    """`when_s`: of `time.monotonic`."""
    return asyncio.get_running_loop().call_later(max(when_s - time.monotonic(), 0.0), ring)


class _Wires:
    """One to tell and one to hear. Lifetime: one stretch."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._open: list[Wire] = []

    async def __aenter__(self) -> list[Wire]:
        try:
            for _ in range(2):
                wire = await open_wire(self._link.url, self._link.place.keys.replicas, ANSWER_S)
                self._open.append(wire)
        except BaseException:
            await self.__aexit__()
            raise
        return self._open

    async def __aexit__(self, *_: object) -> None:
        for wire in self._open:
            with suppress(RedisError, OSError):
                await wire.aclose()

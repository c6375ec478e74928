"""One stretch of time in which the link is up: we are there, and what we say goes out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from router.replicas.exchange import MAX_MESSAGE_BYTES
from router.replicas.hearing import Hearing
from router.replicas.place import Place
from router.replicas.redis_wire import ANSWER_S, Command, Wire, checked
from router.replicas.roll import FIELDS, Entry, entry_text, read_entries
from router.replicas.said import GOODBYE, Said

log = logging.getLogger(__name__)

BEAT_S = 0.5
_LOOK_S = 0.05  # between two looks where no news are told
_MOST_AT_ONCE = 16  # messages in one flush
_REGISTRY_S = 86_400.0  # after the last beat of all
_STREAM_LEASES = 10.0  # a stream outlives its replica by so many leases


class Connected:
    """Lifetime: until one of its two wires fails; `join` first, then `tell` and `hear` at once."""

    def __init__(self, place: Place, telling: Wire, hearing: Wire) -> None:
        self._place = place
        self._wire = telling
        self._hearing = Hearing(place, hearing)
        self.hear = self._hearing.hear
        self._said = Said(place.keys.said(place.me))
        self._looked_s = place.clock()
        self._announced = False
        self._news = asyncio.Event()
        self._flushed_s = float("-inf")
        place.exchange.on_news = self._news.set

    async def join(self) -> None:
        """Be one of those who are there; peers are heard from now on.

        Raises what `Wire.call` raises, and error replies.
        """
        place = self._place
        place.roll.connected()
        await self._hearing.begin(self._wire)
        await self._beat([])
        place.exchange.joined(place.clock())

    async def tell(self) -> None:
        """Flush after flush, until it is time to leave; raises as `join`."""
        place = self._place
        while not place.leaving:
            await self._something()
            payloads = self._payloads()
            if place.clock() - self._looked_s >= BEAT_S:
                await self._beat(payloads)
            elif payloads:
                await self._flush(payloads)
        await self._leave()

    async def _something(self) -> None:
        """Until there may be something to say: at once after a pause, so that two requests that
        come soon after each other do not go to the same idle worker by way of two replicas; in
        a flood once in `flush_s`, for each message costs as much as what it tells.
        """
        place = self._place
        await asyncio.sleep(max(self._flushed_s + place.flush_s - place.clock(), 0.0))
        if not self._news.is_set():  # in a flood it is by now: that took one turn of the loop
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._news.wait()
        self._news.clear()
        self._flushed_s = place.clock()

    def _payloads(self) -> list[bytes]:
        place, payloads = self._place, list[bytes]()
        while len(payloads) < _MOST_AT_ONCE:
            payload = place.exchange.outgoing(place.clock())
            if payload is None:
                break
            if len(payload) > MAX_MESSAGE_BYTES:
                place.counters.dropped += 1
                log.error("a message of %d bytes is not told, it is too long", len(payload))
            else:
                payloads.append(payload)
        return payloads

    async def _flush(self, payloads: list[bytes], more: Sequence[Command] = ()) -> list[Any]:
        """The replies to what goes out along with the messages."""
        counters, count = self._place.counters, len(payloads)
        counters.dropped += count
        commands = [self._said.command(payload) for payload in payloads]
        replies = await self._wire.call([*commands, *more], ANSWER_S)
        for payload, reply in zip(payloads, checked(replies[:count]), strict=True):
            self._said.appended(reply, len(payload))
            counters.told_bytes += len(payload)
        counters.dropped -= count
        counters.told_messages += count
        return replies[count:]

    async def _beat(self, payloads: list[bytes]) -> None:
        """Be there, and look who else is; renew leases."""
        place = self._place
        keys, roll = place.keys, place.roll
        place.beats += 1
        entry = entry_text(Entry(place.beats, dict(place.terms)))
        stream_ms = int(place.lease_s * _STREAM_LEASES * 1e3)
        commands: list[Command] = [
            ("HSET", keys.replicas, place.me, entry),
            ("HSCAN", keys.replicas, 0, "COUNT", FIELDS),
            ("PEXPIRE", keys.replicas, int(_REGISTRY_S * 1e3)),
            ("PEXPIRE", keys.said(place.me), stream_ms),
        ]
        if roll.lapsed:
            commands.append(("HDEL", keys.replicas, *roll.lapsed))
            roll.lapsed = []
        own = len(commands)
        asked, asking = place.leases.commands()
        asked_s = place.clock()
        replies = await self._flush(payloads, [*commands, *asking])
        place.leases.answered(asked, replies[own:], asked_s)
        new, fields, *_ = checked(replies[:own])
        self._look(fields)
        if new:  # for the first time, or what was there is gone
            place.counters.lapses += self._announced
            self._announced = True
            arrival = ("XADD", keys.arrivals, "MAXLEN", "~", 64, "*", place.me, entry)
            await self._ask([arrival, ("PEXPIRE", keys.arrivals, int(_REGISTRY_S * 1e3))])
        self._announced = True
        await self._hearing.follow(self._wire)

    def _look(self, reply: Any) -> None:
        place = self._place
        now_s, before_s = place.clock(), self._looked_s
        self._looked_s = now_s
        cursor, fields = reply
        entries, malformed = read_entries(fields)
        if cursor != b"0":
            malformed += 1
        self._hearing.count_malformed(malformed, place.keys.replicas)
        place.roll.look(entries, min(now_s - before_s, 2 * BEAT_S))
        peers = {name: peer.entry.terms for name, peer in place.roll.peers.items()}
        place.disagreements.look(place.terms, peers)
        self._hearing.tell_present()

    async def _leave(self) -> None:
        place = self._place
        keys, said = place.keys, place.keys.said(place.me)
        await self._flush(
            self._payloads(),
            [
                ("XADD", said, "*", GOODBYE, b"1"),
                ("PEXPIRE", said, int(place.lease_s * 1e3)),
                ("HDEL", keys.replicas, place.me),
                *place.leases.goodbye(),
            ],
        )

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        return checked(await self._wire.call(commands, ANSWER_S))

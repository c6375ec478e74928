"""The link to Redis, kept up as long as the router runs, and the streams of messages in it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from redis.exceptions import RedisError, ResponseError

from router.config.schema import Config
from router.lines import worth_a_line
from router.replicas.lease import Leases
from router.replicas.peers import (
    FIELDS,
    VERSION,
    Disagreements,
    Entry,
    Keys,
    ReplicaRefusedError,
    Roll,
    differences,
    entry_text,
    name_of,
    read_entries,
    read_entry,
    read_identity,
    refusal,
)
from router.replicas.redis_connection import ANSWER_S, Command, Wire, checked, open_wire, reason_of
from router.replicas.redis_url import RedisUrl, parse_redis_url

MAX_MESSAGE_BYTES = 256 << 10


class Exchange(Protocol):
    """One replica's side. Peers are named `name@epoch`: a router begun anew is another one.

    All times are this process' own clock. Nothing here raises or waits.
    """

    on_news: Callable[[], None]  # told when there is something to say again; set by the link

    def joined(self, now_s: float) -> None:
        """The link is up, perhaps again: all is told anew, and asked for."""
        ...

    def parted(self, now_s: float) -> None:
        """The link is down: what is known of peers is stale, and stays."""
        ...

    def outgoing(self, now_s: float) -> bytes | None:
        """The next message, of at most `MAX_MESSAGE_BYTES`; None: there is nothing to say."""
        ...

    def incoming(self, peer: str, payload: bytes, now_s: float) -> None:
        """A message of a peer, as it came: it may hold anything."""
        ...

    def present(self, peers: Collection[str], now_s: float) -> None:
        """All peers whose lease holds; any other is gone."""
        ...


@dataclass(slots=True)
class LinkCounters:
    """Counts only ever grow. Lifetime: process."""

    told_messages: int = 0
    told_bytes: int = 0
    heard_messages: int = 0
    heard_bytes: int = 0
    dropped: int = 0  # of ours: too long, or lost with the link
    malformed: int = 0  # of others: entries that are no messages, fields that are no replicas
    reconnects: int = 0  # times that the link was up again
    lapses: int = 0  # times that our own entry was gone from the registry


@dataclass(slots=True)
class Place:
    """Lifetime: process."""

    me: str
    keys: Keys
    exchange: Exchange
    roll: Roll
    leases: Leases
    terms: Mapping[str, str]  # what must agree (`agreement.py`); replaced at a reload
    flush_s: float
    lease_s: float
    clock: Callable[[], float]
    counters: LinkCounters = field(default_factory=LinkCounters)
    disagreements: Disagreements = field(default_factory=Disagreements)
    beats: int = 0
    leaving: bool = False  # the next flush is the last


MESSAGE = b"m"
GOODBYE = b"bye"

KEPT_ENTRIES = 1_024
KEPT_BYTES = 16 << 20
_WORD_BYTES = 64  # of an entry besides its payload, by a rough count


class Said:
    """Lifetime: while the link is up.

    Redis bounds a stream by entries only, so what to keep is reckoned here: the id of the oldest
    entry within both bounds. Redis may keep a little more (`~`, at most a node of its tree).
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._entries: deque[tuple[bytes, int]] = deque()  # id, bytes
        self._kept_bytes = 0
        self._trim = False

    def command(self, payload: bytes) -> Command:
        """The next XADD."""
        trim: Command = ()
        if self._trim and self._entries:
            trim, self._trim = ("MINID", "~", self._entries[0][0]), False
        return ("XADD", self._key, *trim, "*", MESSAGE, payload)

    def appended(self, entry_id: Any, payload_bytes: int) -> None:
        """Redis' reply to one of them."""
        if not isinstance(entry_id, bytes):
            return
        size_bytes = payload_bytes + _WORD_BYTES
        self._entries.append((entry_id, size_bytes))
        self._kept_bytes += size_bytes
        while len(self._entries) > KEPT_ENTRIES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._entries.popleft()[1]
            self._trim = True


log = logging.getLogger(__name__)

_BLOCK_S = 0.5  # that Redis keeps a reader waiting
_MOST_AT_ONCE = 16  # entries of one peer in one read
# Between two reads, so that several peers' messages come together: what happened is known within
# a flush, as much of the next one, and the way.
_PACE_FLUSHES, _MOST_PACE_S = 0.75, 0.01

Id = tuple[int, int]
_BEGINNING: Id = (0, 0)


class Hearing:
    """Lifetime: while the link is up."""

    def __init__(self, place: Place, wire: Wire) -> None:
        self._place = place
        self._wire = wire
        self._arrivals: Id = _BEGINNING
        self._read: dict[str, Id] = {}  # peer -> the latest entry of its stream that was read
        self._heard_s: dict[str, float] = {}  # peer -> when that was
        self._present: frozenset[str] | None = None  # as the exchange was told

    async def begin(self, wire: Wire) -> None:
        """Hear of who arrives from now on. Raises what `Wire.call` raises, and error replies."""
        (latest,) = checked(await wire.call([_tail(self._place.keys.arrivals)], ANSWER_S))
        self._arrivals = _latest(latest)

    async def hear(self) -> None:
        """Read after read, for ever; raises as `begin`."""
        place = self._place
        pace_s = min(place.flush_s * _PACE_FLUSHES, _MOST_PACE_S)
        block_ms = int(_BLOCK_S * 1e3)
        while True:
            peers = list(self._read)
            streams = [place.keys.arrivals, *map(place.keys.said, peers)]
            ids = [self._arrivals, *(self._read[peer] for peer in peers)]
            command = ("XREAD", "COUNT", _MOST_AT_ONCE, "BLOCK", block_ms, "STREAMS", *streams)
            (reply,) = await self._wire.call(
                [(*command, *(f"{ms}-{number}" for ms, number in ids))], _BLOCK_S + ANSWER_S
            )
            if isinstance(reply, ResponseError):
                await self._find_unreadable(peers, reply)
            elif reply:
                by_stream = dict(zip(streams, [None, *peers], strict=True))
                for stream, entries in reply:
                    self._entries(by_stream[stream.decode()], entries)
                await asyncio.sleep(pace_s)

    async def follow(self, wire: Wire) -> None:
        """Read also whom we did not; see whether streams that are silent were begun anew.

        Raises as `begin`.
        """
        place, now_s, present = self._place, self._place.clock(), self._here()
        for gone in self._read.keys() - present:
            del self._read[gone]
        silent = [p for p in self._read if now_s - self._heard_s[p] >= place.lease_s]
        await self._seek([*(present - self._read.keys()), *silent], wire)

    def tell_present(self) -> None:
        """The exchange learns who is here, where that changed."""
        present = self._here()
        if present != self._present:
            self._present = present
            self._place.exchange.present(present, self._place.clock())
            names = ", ".join(sorted(present)[:20]) or "no other one"
            log.info("replicas of this fleet besides %s: %s", self._place.me, names)

    def count_malformed(self, count: int, key: str) -> None:
        """Of somebody else: what it means nobody knows."""
        before = self._place.counters.malformed
        self._place.counters.malformed += count
        if any(worth_a_line(number) for number in range(before + 1, before + count + 1)):
            line = "what is no replica's stands in redis under %s, and is ignored (%d so far)"
            log.warning(line, key, before + count)

    def _here(self) -> frozenset[str]:
        return self._place.roll.present(self._place.terms[VERSION])

    def _entries(self, peer: str | None, entries: Iterable[Any]) -> None:
        """Of a stream; `peer` None: of those who arrive."""
        for entry_id, fields in entries:
            pair = fields if fields is not None and len(fields) == 2 else (b"", b"")
            if peer is None:
                self._arrivals = _id(entry_id)
                self._arrived(*pair)
                continue
            if peer not in self._read:
                return  # gone meanwhile
            self._read[peer] = _id(entry_id)
            self._message(peer, *pair)

    def _arrived(self, field: bytes, value: bytes) -> None:
        identity, entry = read_identity(field), read_entry(value)
        if identity is None or entry is None:
            self.count_malformed(1, self._place.keys.arrivals)
        elif self._place.roll.arrived(identity, entry) and identity in self._here():
            self._read[identity], self._heard_s[identity] = _BEGINNING, self._place.clock()
            self.tell_present()

    def _message(self, peer: str, field: bytes, payload: bytes) -> None:
        place, counters = self._place, self._place.counters
        if field == MESSAGE and len(payload) <= MAX_MESSAGE_BYTES:
            now_s = self._heard_s[peer] = place.clock()
            counters.heard_messages += 1
            counters.heard_bytes += len(payload)
            place.roll.heard(peer)
            place.exchange.incoming(peer, payload, now_s)
        elif field == GOODBYE:
            place.roll.left(peer)
            del self._read[peer]
            self.tell_present()
        else:
            self.count_malformed(1, place.keys.said(peer))

    async def _seek(self, peers: Sequence[str], wire: Wire) -> int:
        """Find the ends of streams; how many cannot be read."""
        if not peers:
            return 0
        place = self._place
        replies = await wire.call([_tail(place.keys.said(peer)) for peer in peers], ANSWER_S)
        unreadable = 0
        for peer, reply in zip(peers, replies, strict=True):
            if isinstance(reply, ResponseError):
                if "WRONGTYPE" not in str(reply):
                    raise reply
                unreadable += 1
                self._read.pop(peer, None)
                self.count_malformed(1, place.keys.said(peer))
                continue
            end = _latest(reply)
            if peer not in self._read:
                self._read[peer], self._heard_s[peer] = end, place.clock()
            elif end < self._read[peer]:  # its numbers go back: it is another stream
                self._read[peer] = _BEGINNING
        return unreadable

    async def _find_unreadable(self, peers: Sequence[str], error: ResponseError) -> None:
        """Redis refuses to read all for the sake of one. Raises `error` where none is found."""
        if not await self._seek(peers, self._wire):
            raise error


def _tail(stream: str) -> Command:
    return ("XREVRANGE", stream, "+", "-", "COUNT", 1)


def _latest(reply: Any) -> Id:
    return _id(reply[0][0]) if reply else _BEGINNING


def _id(text: bytes) -> Id:
    ms, _, number = text.partition(b"-")
    return int(ms), int(number)


BEAT_S = 0.5
_LOOK_S = 0.05  # between two looks where no news are told
_FLUSH_MESSAGES = 16  # messages in one flush
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
        while len(payloads) < _FLUSH_MESSAGES:
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


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5  # between attempts to connect
_PROVEN_S = 5.0  # up for so long: the next attempt comes soon again
_GOODBYE_S = 1.0
_AGREE_LOOK_S = 0.1  # between looks whether somebody is alive who differs


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
            await asyncio.sleep(_AGREE_LOOK_S)
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

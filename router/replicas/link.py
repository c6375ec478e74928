"""Connects a replica to Redis, reconnects while the router runs, and reads and writes the streams
of messages in it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError, ResponseError

from router.config.extras import Replicas
from router.record.logs import worth_a_line
from router.redis.connection import ANSWER_S, Command, Wire, checked, open_wire, reason_of
from router.redis.url import RedisUrl
from router.replicas.lease import Leases
from router.replicas.membership import (
    FIELDS,
    VERSION,
    Disagreements,
    Entry,
    Keys,
    Membership,
    ReplicaRefusedError,
    differences,
    entry_text,
    name_of,
    read_entries,
    read_entry,
    read_identity,
    refusal,
)
from router.replicas.sharing import Sharing

MAX_MESSAGE_BYTES = 256 << 10


@dataclass(slots=True)
class LinkCounters:
    """The counts of the connection to Redis; they only grow. Lifetime: process."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0
    dropped: int = 0  # of ours: too long, or lost with the link
    # Invalid data of peers: entries that are no messages, fields that are no replicas.
    malformed: int = 0
    reconnects: int = 0  # times that the link was up again
    lapses: int = 0  # times that our own entry was gone from the registry


MESSAGE = b"m"
GOODBYE = b"bye"

KEPT_ENTRIES = 1_024
KEPT_BYTES = 16 << 20
_ENTRY_BYTES = 64  # approximate size of an entry without its payload


class OwnStream:
    """The Redis stream to which this replica writes, trimmed to a limited size. Lifetime: one
    connection to Redis.

    Redis can limit only a stream's number of entries, so this class computes the id of the oldest
    entry with which both the entries and the bytes are within their limits. Redis may keep a little
    more (`~`, at most a node of its tree).
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._entries: deque[tuple[bytes, int]] = deque()  # id, bytes
        self._kept_bytes = 0
        self._trim = False

    def command(self, payload: bytes) -> Command:
        """Return the XADD command for this payload."""
        trim: Command = ()
        if self._trim and self._entries:
            trim, self._trim = ("MINID", "~", self._entries[0][0]), False
        return ("XADD", self._key, *trim, "*", MESSAGE, payload)

    def appended(self, entry_id: Any, payload_bytes: int) -> None:
        """Note the id of the new entry, which is Redis' reply to an XADD."""
        if not isinstance(entry_id, bytes):
            return
        size_bytes = payload_bytes + _ENTRY_BYTES
        self._entries.append((entry_id, size_bytes))
        self._kept_bytes += size_bytes
        while len(self._entries) > KEPT_ENTRIES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._entries.popleft()[1]
            self._trim = True


log = logging.getLogger(__name__)

_BLOCK_S = 0.5  # time for which a read waits in Redis, seconds
_MAX_ENTRIES = 16  # most entries of one peer in one read
# Between two reads, so that messages of several peers are read together: an event is known after a
# flush, most of the next one, and the way.
_PACE_FLUSHES, _MOST_PACE_S = 0.75, 0.01

Id = tuple[int, int]
_BEGINNING: Id = (0, 0)


class StreamReader:
    """Reads the Redis streams of all peers together. Lifetime: one connection to Redis."""

    def __init__(self, link: Link, wire: Wire) -> None:
        self._link = link
        self._wire = wire
        self._arrivals: Id = _BEGINNING
        self._read: dict[str, Id] = {}  # peer -> the latest entry of its stream that was read
        self._message_s: dict[str, float] = {}  # peer -> when that was
        self._present: frozenset[str] | None = None  # as the exchange was last told

    async def begin(self, wire: Wire) -> None:
        """Find the end of the stream of arriving replicas. Raises the errors of `Wire.call`, and
        Redis' error replies.
        """
        (latest,) = checked(await wire.call([_tail(self._link.keys.arrivals)], ANSWER_S))
        self._arrivals = _latest(latest)

    async def read(self) -> None:
        """Read new entries of all streams until cancelled. Raises the same errors as `begin`."""
        link = self._link
        pace_s = min(link.flush_s * _PACE_FLUSHES, _MOST_PACE_S)
        block_ms = int(_BLOCK_S * 1e3)
        while True:
            peers = list(self._read)
            streams = [link.keys.arrivals, *map(link.keys.stream, peers)]
            ids = [self._arrivals, *(self._read[peer] for peer in peers)]
            command = ("XREAD", "COUNT", _MAX_ENTRIES, "BLOCK", block_ms, "STREAMS", *streams)
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
        """Begin to read the streams of new peers, and check whether a silent peer's stream was
        created again. Raises the same errors as `begin`.
        """
        link, now_s, present = self._link, self._link.clock(), self._here()
        for gone in self._read.keys() - present:
            del self._read[gone]
        silent = [p for p in self._read if now_s - self._message_s[p] >= link.lease_s]
        await self._find_stream_ends([*(present - self._read.keys()), *silent], wire)

    def report_running_peers(self) -> None:
        """Report to the exchange which peers are running, if that changed."""
        present = self._here()
        if present != self._present:
            self._present = present
            self._link.exchange.present(present, self._link.clock())
            names = ", ".join(sorted(present)[:20]) or "no other one"
            log.info("replicas of this fleet besides %s: %s", self._link.identity, names)

    def count_malformed(self, count: int, key: str) -> None:
        """Count entries of the stream `key` that no replica can have written."""
        before = self._link.counters.malformed
        self._link.counters.malformed += count
        if any(worth_a_line(number) for number in range(before + 1, before + count + 1)):
            line = "ignored entries in redis under %s that no replica wrote (%d so far)"
            log.warning(line, key, before + count)

    def _here(self) -> frozenset[str]:
        return self._link.membership.present(self._link.terms[VERSION])

    def _entries(self, peer: str | None, entries: Iterable[Any]) -> None:
        """Process the entries of a peer's stream, or of the stream of arrivals if `peer` is
        None.
        """
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
            self.count_malformed(1, self._link.keys.arrivals)
        elif self._link.membership.arrived(identity, entry) and identity in self._here():
            self._read[identity], self._message_s[identity] = _BEGINNING, self._link.clock()
            self.report_running_peers()

    def _message(self, peer: str, field: bytes, payload: bytes) -> None:
        link, counters = self._link, self._link.counters
        if field == MESSAGE and len(payload) <= MAX_MESSAGE_BYTES:
            now_s = self._message_s[peer] = link.clock()
            counters.received_messages += 1
            counters.received_bytes += len(payload)
            link.membership.on_message(peer)
            link.exchange.incoming(peer, payload, now_s)
        elif field == GOODBYE:
            link.membership.left(peer)
            del self._read[peer]
            self.report_running_peers()
        else:
            self.count_malformed(1, link.keys.stream(peer))

    async def _find_stream_ends(self, peers: Sequence[str], wire: Wire) -> int:
        """Find the ends of these peers' streams, to read on from there. Return how many streams are
        unreadable.
        """
        if not peers:
            return 0
        link = self._link
        replies = await wire.call([_tail(link.keys.stream(peer)) for peer in peers], ANSWER_S)
        unreadable = 0
        for peer, reply in zip(peers, replies, strict=True):
            if isinstance(reply, ResponseError):
                if "WRONGTYPE" not in str(reply):
                    raise reply
                unreadable += 1
                self._read.pop(peer, None)
                self.count_malformed(1, link.keys.stream(peer))
                continue
            end = _latest(reply)
            if peer not in self._read:
                self._read[peer], self._message_s[peer] = end, link.clock()
            elif end < self._read[peer]:  # its numbers go back: it is another stream
                self._read[peer] = _BEGINNING
        return unreadable

    async def _find_unreadable(self, peers: Sequence[str], error: ResponseError) -> None:
        """Find the stream that cannot be read, after Redis refused to read all streams together.
        Raises `error` if there is no such stream.
        """
        if not await self._find_stream_ends(peers, self._wire):
            raise error


def _tail(stream: str) -> Command:
    return ("XREVRANGE", stream, "+", "-", "COUNT", 1)


def _latest(reply: Any) -> Id:
    return _id(reply[0][0]) if reply else _BEGINNING


def _id(text: bytes) -> Id:
    ms, _, number = text.partition(b"-")
    return int(ms), int(number)


BEAT_S = 0.5
_CHECK_S = 0.05  # interval between two checks for news if none are signalled, seconds
_FLUSH_MESSAGES = 16  # messages in one flush
_REGISTRY_S = 86_400.0  # the registry expires this long after the last beat of any router, seconds
_STREAM_LEASES = 10.0  # lease times by which a stream outlives its replica


class Connected:
    """A working connection to Redis. Lifetime: until one of its two wires fails.

    `join` must be called first, and then `write` and `read` concurrently.
    """

    def __init__(self, link: Link, writing: Wire, reading: Wire) -> None:
        self._link = link
        self._wire = writing
        self._reader = StreamReader(link, reading)
        self.read = self._reader.read
        self._stream = OwnStream(link.keys.stream(link.identity))
        self._looked_s = link.clock()
        self._announced = False
        self._news = asyncio.Event()
        self._flushed_s = float("-inf")
        link.exchange.on_news = self._news.set

    async def join(self) -> None:
        """Register this replica and begin to read peers' messages. Raises the errors of
        `Wire.call`, and Redis' error replies.
        """
        link = self._link
        link.membership.connected()
        await self._reader.begin(self._wire)
        await self._beat([])
        link.exchange.joined(link.clock())

    async def write(self) -> None:
        """Send messages until this replica leaves. Raises the same errors as `join`."""
        link = self._link
        while not link.leaving:
            await self._news_or_pause()
            payloads = self._payloads()
            if link.clock() - self._looked_s >= BEAT_S:
                await self._beat(payloads)
            elif payloads:
                await self._flush(payloads)
        await self._leave()

    async def _news_or_pause(self) -> None:
        """Wait until there may be messages to send.

        After a pause this returns at once, so that two replicas do not send requests, one shortly
        after the other, to the same idle worker. During a flood of events it returns once in
        `flush_s` seconds, because each message costs as much as the events in it.
        """
        link = self._link
        await asyncio.sleep(max(self._flushed_s + link.flush_s - link.clock(), 0.0))
        if not self._news.is_set():  # in a flood it is by now: that took one turn of the loop
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S):
                    await self._news.wait()
        self._news.clear()
        self._flushed_s = link.clock()

    def _payloads(self) -> list[bytes]:
        link, payloads = self._link, list[bytes]()
        while len(payloads) < _FLUSH_MESSAGES:
            payload = link.exchange.outgoing(link.clock())
            if payload is None:
                break
            if len(payload) > MAX_MESSAGE_BYTES:
                link.counters.dropped += 1
                log.error("a message of %d bytes is too long, and is not sent", len(payload))
            else:
                payloads.append(payload)
        return payloads

    async def _flush(self, payloads: list[bytes], more: Sequence[Command] = ()) -> list[Any]:
        """Send these messages and the commands `more`. Return the replies to `more`."""
        counters, count = self._link.counters, len(payloads)
        counters.dropped += count
        commands = [self._stream.command(payload) for payload in payloads]
        replies = await self._wire.call([*commands, *more], ANSWER_S)
        for payload, reply in zip(payloads, checked(replies[:count]), strict=True):
            self._stream.appended(reply, len(payload))
            counters.sent_bytes += len(payload)
        counters.dropped -= count
        counters.sent_messages += count
        return replies[count:]

    async def _beat(self, payloads: list[bytes]) -> None:
        """Send a heartbeat: renew this replica's entry and leases, and read the entries of all
        other replicas.
        """
        link = self._link
        keys, membership = link.keys, link.membership
        link.beats += 1
        entry = entry_text(Entry(link.beats, dict(link.terms)))
        stream_ms = int(link.lease_s * _STREAM_LEASES * 1e3)
        commands: list[Command] = [
            ("HSET", keys.replicas, link.identity, entry),
            ("HSCAN", keys.replicas, 0, "COUNT", FIELDS),
            ("PEXPIRE", keys.replicas, int(_REGISTRY_S * 1e3)),
            ("PEXPIRE", keys.stream(link.identity), stream_ms),
        ]
        if membership.lapsed:
            commands.append(("HDEL", keys.replicas, *membership.lapsed))
            membership.lapsed = []
        own = len(commands)
        asked, asking = link.leases.commands()
        asked_s = link.clock()
        replies = await self._flush(payloads, [*commands, *asking])
        link.leases.read_replies(asked, replies[own:], asked_s)
        new, fields, *_ = checked(replies[:own])
        self._look(fields)
        if new:  # the key is new, or its content was lost
            link.counters.lapses += self._announced
            self._announced = True
            arrival = ("XADD", keys.arrivals, "MAXLEN", "~", 64, "*", link.identity, entry)
            await self._execute([arrival, ("PEXPIRE", keys.arrivals, int(_REGISTRY_S * 1e3))])
        self._announced = True
        await self._reader.follow(self._wire)

    def _look(self, reply: Any) -> None:
        link = self._link
        now_s, before_s = link.clock(), self._looked_s
        self._looked_s = now_s
        cursor, fields = reply
        entries, malformed = read_entries(fields)
        if cursor != b"0":
            malformed += 1
        self._reader.count_malformed(malformed, link.keys.replicas)
        link.membership.look(entries, min(now_s - before_s, 2 * BEAT_S))
        peers = {name: peer.entry.terms for name, peer in link.membership.peers.items()}
        link.disagreements.look(link.terms, peers)
        self._reader.report_running_peers()

    async def _leave(self) -> None:
        link = self._link
        keys, said = link.keys, link.keys.stream(link.identity)
        payloads = self._payloads()
        link.exchange.leave()
        await self._flush(
            payloads,
            [
                ("XADD", said, "*", GOODBYE, b"1"),
                ("PEXPIRE", said, int(link.lease_s * 1e3)),
                ("HDEL", keys.replicas, link.identity),
                *link.leases.goodbye(),
            ],
        )

    async def _execute(self, commands: Sequence[Command]) -> list[Any]:
        return checked(await self._wire.call(commands, ANSWER_S))


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5  # between attempts to connect
_PROVEN_S = 5.0  # after a connection of this length the next attempt follows soon, seconds
_GOODBYE_S = 1.0
_AGREE_CHECK_S = 0.1  # interval between two checks for a live router with other settings, seconds


class Link:
    """The connection of this replica to Redis, which is restored whenever it is lost. Lifetime:
    process.

    `agree`, `start` and `aclose` are called once each, in this order.
    """

    def __init__(
        self,
        url: RedisUrl,
        replicas: Replicas,
        identity: str,
        exchange: Sharing,
        terms: Mapping[str, str],
    ) -> None:
        """Prepare the connection. `url` is the URL of Redis, `identity` is made by `new_identity`,
        and `terms` by `terms_of`.
        """
        keys = Keys(replicas.fleet)
        self.url = url
        self.identity = identity
        self.keys = keys
        self.exchange = exchange
        self.membership = Membership(identity, replicas.lease_s)
        self.leases = Leases(keys, identity, replicas.lease_s, time.monotonic, _call_at)
        self.terms = terms  # the settings that must agree; replaced at a reload
        self.flush_s, self.lease_s = replicas.flush_s, replicas.lease_s
        self.clock = time.monotonic
        self.counters = LinkCounters()
        self.disagreements = Disagreements()
        self.beats = 0
        self.leaving = False  # the next flush is the last
        self.up = False
        self.down_since_s: float | None = time.monotonic()  # None: it is up
        self._running: asyncio.Task[None] | None = None
        self._complaints: set[str] = set()  # since it was up last
        self._attempts = 0
        self._moved = asyncio.Event()  # to another URL, since we began to connect

    @property
    def stale_s(self) -> float:
        """The seconds since the connection to Redis was lost; 0 while it works."""
        return 0.0 if self.down_since_s is None else self.clock() - self.down_since_s

    async def agree(self) -> None:
        """Raise ReplicaRefusedError if a running replica has different settings where all replicas
        must have the same. If Redis does not answer, log that and let the router start.
        """
        wire: Wire | None = None
        try:
            wire = await open_wire(self.url, self.keys.replicas, ANSWER_S)
            await self._look_for_others(wire)
        except ReplicaRefusedError:
            raise
        except Exception as error:  # noqa: BLE001 - told by name, and tried again
            self._complain(error)
        finally:
            if wire is not None:
                await wire.aclose()

    def start(self) -> None:
        """Start the task that connects this replica to Redis and keeps it connected."""
        self._running = asyncio.create_task(self._run(), name="link to replicas")

    async def aclose(self) -> None:
        """Leave the fleet and close the link, within a second."""
        if self._running is None:
            return
        self.leaving = True
        if self.up:
            await asyncio.wait([self._running], timeout=_GOODBYE_S)
        self._running.cancel()
        await asyncio.wait([self._running])

    def renew(self, terms: Mapping[str, str], url: RedisUrl) -> None:
        """Use a reloaded configuration, with which peers compare theirs from now on.

        If the URL or its password has changed, the replica reconnects at once.
        """
        self.terms = terms
        if url != self.url:
            self.url = url
            self._complaints.clear()
            self._moved.set()

    # --- inside -------------------------------------------------------------------------------

    async def _look_for_others(self, wire: Wire) -> None:
        first = await self._others(wire)
        suspects = {name: entry for name, entry in first.items() if self._differs(entry)}
        until_s = self.clock() + self.lease_s
        while suspects and self.clock() < until_s:  # to see whether its heartbeat continues
            await asyncio.sleep(_AGREE_CHECK_S)
            now = await self._others(wire)
            for name, entry in suspects.items():
                if name in now and now[name].beat != entry.beat and self._differs(now[name]):
                    raise refusal(name, self._differs(now[name]))
            suspects = {name: entry for name, entry in suspects.items() if name in now}

    async def _others(self, wire: Wire) -> dict[str, Entry]:
        """Return the entries of replicas with other names. An entry with this replica's name
        belongs to the router that it replaces.
        """
        command = ("HSCAN", self.keys.replicas, 0, "COUNT", FIELDS)
        (reply,) = checked(await wire.call([command], ANSWER_S))
        entries, _ = read_entries(reply[1])
        ours = name_of(self.identity)
        return {name: entry for name, entry in entries.items() if name_of(name) != ours}

    def _differs(self, entry: Entry) -> str:
        return "; ".join(text for _, text in differences(self.terms, entry.terms))

    async def _run(self) -> None:
        while not self.leaving:
            begun_s = self.clock()
            try:
                await self._stretch()
            except Exception as error:  # noqa: BLE001 - told by name, and tried again
                self._complain(error)
            self._part()
            if self.clock() - begun_s > _PROVEN_S:
                self._attempts = 0
            if not self.leaving:
                await asyncio.sleep(self._pause_s())

    async def _stretch(self) -> None:
        """Use one connection until it is lost, the URL changes, or this replica leaves."""
        self._moved.clear()
        async with _wires(self) as wires:
            connected = Connected(self, *wires)
            await connected.join()
            self._joined()
            work = connected.write(), connected.read(), self._moved.wait()
            tasks = [asyncio.ensure_future(each) for each in work]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error

    def _joined(self) -> None:
        self.up, self.down_since_s = True, None
        self._complaints.clear()
        self.counters.reconnects += 1
        fleet = self.keys.fleet
        log.info("shares state as %s of fleet %s at %s", self.identity, fleet, self.url)

    def _part(self) -> None:
        if self.up:
            self.up, self.down_since_s = False, self.clock()
            self.exchange.parted(self.clock())

    def _pause_s(self) -> float:
        longest_s = min(_FIRST_PAUSE_S * 2**self._attempts, _LONGEST_PAUSE_S)
        self._attempts = min(self._attempts + 1, 16)
        return random.uniform(longest_s / 2, longest_s)

    def _complain(self, error: Exception) -> None:
        """Log a failure if its reason was not logged since the connection last worked."""
        reason = reason_of(error)
        if reason in self._complaints or self.leaving:
            return
        self._complaints.add(reason)
        trace = None if isinstance(error, (RedisError, OSError)) else error
        log.error(
            "state: %s %s; this router continues with its last known state, and tries again",
            self.url,
            reason,
            exc_info=trace,
        )


def _call_at(when_s: float, ring: Callable[[], None]) -> asyncio.TimerHandle:
    """Call `ring` at `when_s`, a time of `time.monotonic`."""
    return asyncio.get_running_loop().call_later(max(when_s - time.monotonic(), 0.0), ring)


@asynccontextmanager
async def _wires(link: Link) -> AsyncIterator[tuple[Wire, Wire]]:
    """Open two connections to Redis, one to write and one to read."""
    async with AsyncExitStack() as stack:
        wires = []
        for _ in range(2):
            wire = await open_wire(link.url, link.keys.replicas, ANSWER_S)
            stack.push_async_callback(_closed, wire)
            wires.append(wire)
        yield wires[0], wires[1]


async def _closed(wire: Wire) -> None:
    with suppress(RedisError, OSError):
        await wire.aclose()

"""What peers say: their streams in Redis, read together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from router.lines import worth_a_line
from router.replicas.agreement import VERSION
from router.replicas.exchange import MAX_MESSAGE_BYTES
from router.replicas.identity import read_identity
from router.replicas.place import Place
from router.replicas.redis_wire import ANSWER_S, Command, Wire, checked
from router.replicas.roll import read_entry
from router.replicas.said import GOODBYE, MESSAGE

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

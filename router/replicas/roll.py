"""Who is there: the registry's entries, and how long each replica was unheard.

A replica writes its entry anew with every beat, with a number that grows. Whoever looks on counts
by its own clock how long that number stands still, and only between looks of its own: no two
clocks are compared, and who was stopped itself holds nobody else for gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from router.lines import worth_a_line
from router.replicas.agreement import VERSION
from router.replicas.identity import read_identity

log = logging.getLogger(__name__)

MOST_PEERS = 255
FIELDS = 1_024  # of the registry, read at once
_MOST_ENTRY_BYTES = 16 << 10
_MOST_GONE = 1_024  # remembered, to tell who comes back

Text = Annotated[str, Meta(max_length=512)]


class Entry(msgspec.Struct, frozen=True):
    """What a replica says of itself in the registry, as a JSON object."""

    beat: Annotated[int, Meta(ge=0, lt=1 << 62)]
    terms: Annotated[dict[Text, Text], Meta(max_length=64)]  # what must agree (`agreement.py`)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Entry)


def entry_text(entry: Entry) -> bytes:
    """As it stands in the registry."""
    return _ENCODER.encode(entry)


def read_entry(text: bytes) -> Entry | None:
    """None: it is none."""
    if len(text) > _MOST_ENTRY_BYTES:
        return None
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_entries(fields: Iterable[bytes]) -> tuple[dict[str, Entry], int]:
    """The registry's fields and values in turn -> its entries, and how many cannot be read."""
    found: dict[str, Entry] = {}
    malformed = 0
    texts = iter(fields)
    for field, value in zip(texts, texts, strict=False):
        identity, entry = read_identity(field), read_entry(value)
        if identity is None or entry is None:
            malformed += 1
        else:
            found[identity] = entry
    return found, malformed


@dataclass(slots=True)
class Peer:
    """Another replica. Lifetime: until it is gone."""

    entry: Entry
    unheard_s: float = 0.0  # between looks of ours


class Roll:
    """Lifetime: process. Sans-I/O; `look` is called about twice a second."""

    def __init__(self, me: str, lease_s: float) -> None:
        self.peers: dict[str, Peer] = {}
        self.returned = 0  # times that somebody was here again who had been held for gone
        self.crowded_out = 0  # times that somebody found no room
        self.lapsed: list[str] = []  # whose entries are to be taken out of the registry
        self._me, self._lease_s = me, lease_s
        self._gone: dict[str, int] = {}  # identity -> its beat as it was last seen

    def present(self, version: str) -> frozenset[str]:
        """Who is here and speaks that version of messages; others are not understood."""
        peers = self.peers.items()
        return frozenset(name for name, peer in peers if peer.entry.terms.get(VERSION) == version)

    def connected(self) -> None:
        """The link is up again. Others may need as long as we did: all are heard as of now."""
        for peer in self.peers.values():
            peer.unheard_s = 0.0

    def look(self, entries: Mapping[str, Entry], elapsed_s: float) -> None:
        """The registry as of now, `elapsed_s` after the look before."""
        for identity, peer in list(self.peers.items()):
            entry = entries.get(identity, peer.entry)
            if entry.beat != peer.entry.beat:
                peer.entry, peer.unheard_s = entry, 0.0
                continue
            peer.unheard_s += elapsed_s
            if peer.unheard_s >= self._lease_s:
                self.left(identity)
                self.lapsed.append(identity)
        for identity, entry in entries.items():
            self.arrived(identity, entry)

    def arrived(self, identity: str, entry: Entry) -> bool:
        """Somebody is there; whether that is new."""
        if identity == self._me or identity in self.peers:
            return False
        if len(self.peers) >= MOST_PEERS:
            self.crowded_out += 1
            if worth_a_line(self.crowded_out):
                log.error("replica %s is ignored: %d others are here", identity, MOST_PEERS)
            return False
        if identity in self._gone:
            if self._gone[identity] == entry.beat:  # what it left behind
                return False
            del self._gone[identity]
            self.returned += 1
        self.peers[identity] = Peer(entry)
        return True

    def heard(self, identity: str) -> None:
        """A message of it came."""
        if (peer := self.peers.get(identity)) is not None:
            peer.unheard_s = 0.0

    def left(self, identity: str) -> None:
        """It said goodbye, or is held for gone."""
        peer = self.peers.pop(identity, None)
        if peer is not None:
            self._gone[identity] = peer.entry.beat
            if len(self._gone) > _MOST_GONE:
                del self._gone[next(iter(self._gone))]

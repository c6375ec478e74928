"""Tracks which replicas are running, gives them names, and checks the settings that must be the
same on all of them.

If settings differ, a prefix has different hashes on two replicas, sessions or tenants are confused,
or two placement rules work against each other. With each heartbeat a replica rewrites its entry
with a growing number. Each observer measures with its own clock for how long a peer's number has
not changed, and counts only the time between its own readings. So no two clocks are compared, and a
replica that was itself stopped declares no peer gone.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from router.keys.key_file import KeyFileError, read_keys
from router.record.logs import worth_a_line
from router.replicas.settings import ReplicaTerms

_IDENTITY = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}@[0-9a-f]{16}")
_STRANGE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME_CHARS = 64


def new_identity(name: str) -> str:
    """Return `name@epoch` as the identity of this process; the epoch makes a restarted router with
    the same name a different peer.

    `name` is the configured name, or "" for the host's name.
    """
    if not name:
        name = _STRANGE.sub("-", socket.gethostname()).lstrip("._-")[:_MAX_NAME_CHARS] or "router"
    return f"{name}@{secrets.token_hex(8)}"


def name_of(identity: str) -> str:
    """Return the name that an identity contains."""
    return identity.rpartition("@")[0]


def read_identity(text: bytes) -> str | None:
    """Return another replica's identity as text, or None if it is malformed."""
    return text.decode("ascii") if _IDENTITY.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class Keys:
    """The Redis keys of one fleet. The braces in them keep all keys in one slot of a Redis cluster.
    Lifetime: process.
    """

    fleet: str

    @property
    def replicas(self) -> str:
        """The key of the registry, a Redis hash from each identity to its `membership.Entry` as
        JSON.
        """
        return f"warmroute:{{{self.fleet}}}:replicas"

    @property
    def arrivals(self) -> str:
        """The key of the stream in which new replicas announce themselves, so that peers need not
        wait until they next read the registry.
        """
        return f"warmroute:{{{self.fleet}}}:arrivals"

    def stream(self, identity: str) -> str:
        """Return the key of a replica's stream of messages."""
        return f"warmroute:{{{self.fleet}}}:stream:{identity}"

    def lease(self, what: str) -> str:
        """Return the key of the Redis string that names the holder of the lease `what`."""
        return f"warmroute:{{{self.fleet}}}:lease:{what}"

    def fence(self, what: str) -> str:
        """Return the key of the Redis string that has the latest fencing token of the
        lease `what`.
        """
        return f"warmroute:{{{self.fleet}}}:fence:{what}"


log = logging.getLogger(__name__)

# Compared by digests: of the tokenizer's file; of tenants' names and salts in the file of keys.
TOKENIZER = "tokenizer"
SALTS = "api_keys_file (tenants' salts)"
VERSION = "version of messages"
_DIGEST_CHARS = 16
_MAX_CHARS = 200
_ABSENT = "nothing"


class ReplicaRefusedError(ValueError):
    """Raised when this router may not share state with a running replica, because their settings
    differ.
    """


def terms_of(terms: ReplicaTerms, speaks: int) -> dict[str, str]:
    """Return the settings that must be the same on all replicas, with `speaks`, the version of
    messages that this router uses.

    It reads the tokenizer's file and the file of API keys.
    """
    alike = {VERSION: str(speaks)}
    alike |= {key: _short(text) for key, text in terms.alike.items()}
    alike[TOKENIZER] = "none"
    if terms.tokenizer is not None:
        alike[TOKENIZER] = _digest_of(_tokenizer_file(Path(terms.tokenizer)))
    alike[SALTS] = "none" if terms.api_keys_file is None else _salts(Path(terms.api_keys_file))
    return alike


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each key whose values differ, with a sentence on how they differ."""
    for key in sorted({*ours, *theirs}):
        here, there = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
        if here != there:
            yield key, f"{key} is {here!r} here and {there!r} there"


class Disagreements:
    """The settings in which running peers differ from this replica. Lifetime: process."""

    def __init__(self) -> None:
        self.now: dict[str, dict[str, str]] = {}  # peer -> key -> how it differs

    def look(self, ours: Mapping[str, str], peers: Mapping[str, Mapping[str, str]]) -> None:
        """Compare the settings of all peers with this replica's, and log new differences."""
        found = {name: dict(differences(ours, theirs)) for name, theirs in peers.items()}
        for name, how in found.items():
            before = self.now.get(name, {})
            if new := [text for key, text in how.items() if before.get(key) != text]:
                log.error("replica %s differs: %s; give both the same", name, "; ".join(new))
            elif before and not how:
                log.info("replica %s agrees again", name)
        self.now = {name: how for name, how in found.items() if how}


def refusal(peer: str, how: str) -> ReplicaRefusedError:
    """Return an error with one line: which replica differs, in what, and what to do."""
    return ReplicaRefusedError(
        f"state: replica {peer} runs and differs: {how}. Give both the same, or start this router "
        "with another replicas.fleet, or stop the other one first"
    )


def _short(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    return f"sha256:{sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]}"


def _tokenizer_file(folder: Path) -> Path:
    both = folder / "tokenizer.json", folder / "tekken.json"
    return next((path for path in both if path.is_file()), both[0])


def _digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            digest = sha256()
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"sha256:{digest.hexdigest()[:_DIGEST_CHARS]}"


def _salts(path: Path) -> str:
    """Return a digest of the tenants' cache salts, or the reason why there is none.

    API keys are not part of it, because they may change on one replica before the others; each
    tenant's cache stays separate anyway.
    """
    try:
        lines = read_keys(path)
    except KeyFileError:
        return "cannot be read"
    pairs = sorted(
        {(line.terms.tenant or "", line.terms.salt or "") for line in lines if line.terms.salt}
    )
    return f"sha256:{sha256(repr(pairs).encode()).hexdigest()[:_DIGEST_CHARS]}" if pairs else "none"


MOST_PEERS = 255
FIELDS = 1_024  # fields of the registry that one command reads
_MAX_ENTRY_BYTES = 16 << 10
_MAX_GONE = 1_024  # most departed peers that are remembered, to recognize those that return

Text = Annotated[str, Meta(max_length=512)]


class Entry(msgspec.Struct, frozen=True):
    """A replica's entry in the registry, a JSON object."""

    beat: Annotated[int, Meta(ge=0, lt=1 << 62)]
    # The settings that must agree (`terms_of`).
    terms: Annotated[dict[Text, Text], Meta(max_length=64)]


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Entry)


def entry_text(entry: Entry) -> bytes:
    """Return the entry as JSON for the registry."""
    return _ENCODER.encode(entry)


def read_entry(text: bytes) -> Entry | None:
    """Return the entry in this JSON, or None if it is malformed."""
    if len(text) > _MAX_ENTRY_BYTES:
        return None
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_entries(fields: Iterable[bytes]) -> tuple[dict[str, Entry], int]:
    """Return the entries of the registry, and the number of malformed ones. `fields` alternates
    between a field's name and its value.
    """
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
    """Another replica that is running. Lifetime: until it is gone."""

    entry: Entry
    silent_s: float = 0.0  # between looks of ours


class Membership:
    """The peers that are running, as their heartbeats show. It does no I/O; `look` is called about
    twice a second. Lifetime: process.
    """

    def __init__(self, me: str, lease_s: float) -> None:
        self.peers: dict[str, Peer] = {}
        self.returned = 0  # times that a peer that counted as gone returned
        self.crowded_out = 0  # times that there was no room for a peer
        self.lapsed: list[str] = []  # peers whose entries must be removed from the registry
        self._me, self._lease_s = me, lease_s
        self._gone: dict[str, int] = {}  # identity -> its beat as it was last seen

    def present(self, version: str) -> frozenset[str]:
        """Return the running peers that use this version of messages. Messages of other versions
        cannot be read.
        """
        peers = self.peers.items()
        return frozenset(name for name, peer in peers if peer.entry.terms.get(VERSION) == version)

    def connected(self) -> None:
        """Note that the connection to Redis works again. All peers count as just heard, because
        they may need as long to reconnect as this replica did.
        """
        for peer in self.peers.values():
            peer.silent_s = 0.0

    def look(self, entries: Mapping[str, Entry], elapsed_s: float) -> None:
        """Process the entries in the registry, which were read `elapsed_s` seconds after the
        previous ones.
        """
        for identity, peer in list(self.peers.items()):
            entry = entries.get(identity, peer.entry)
            if entry.beat != peer.entry.beat:
                peer.entry, peer.silent_s = entry, 0.0
                continue
            peer.silent_s += elapsed_s
            if peer.silent_s >= self._lease_s:
                self.left(identity)
                self.lapsed.append(identity)
        for identity, entry in entries.items():
            self.arrived(identity, entry)

    def arrived(self, identity: str, entry: Entry) -> bool:
        """Note that a peer is running. Return whether it is new."""
        if identity == self._me or identity in self.peers:
            return False
        if len(self.peers) >= MOST_PEERS:
            self.crowded_out += 1
            if worth_a_line(self.crowded_out):
                log.error(
                    "replica %s is ignored: there are %d others already", identity, MOST_PEERS
                )
            return False
        if identity in self._gone:
            if self._gone[identity] == entry.beat:  # its entry is left from before
                return False
            del self._gone[identity]
            self.returned += 1
        self.peers[identity] = Peer(entry)
        return True

    def on_message(self, identity: str) -> None:
        """Note that a message of this peer arrived."""
        if (peer := self.peers.get(identity)) is not None:
            peer.silent_s = 0.0

    def left(self, identity: str) -> None:
        """Remove a peer that ended in good order, or that has been silent for too long."""
        peer = self.peers.pop(identity, None)
        if peer is not None:
            self._gone[identity] = peer.entry.beat
            if len(self._gone) > _MAX_GONE:
                del self._gone[next(iter(self._gone))]

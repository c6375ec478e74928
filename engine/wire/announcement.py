"""The entry by which a worker announces itself in Redis, as JSON.

The set `warmroute:{FLEET}:workers` has the URLs of all workers; the string
`warmroute:{FLEET}:worker:URL` has the entry of one worker, with a time to live that every heartbeat
renews. So only the clock of Redis decides which worker is gone. The braces keep the keys of a fleet
in one slot of a cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from engine.wire.events import WireError

VERSION = 1
MAX_BYTES = 8_192  # of an entry
MAX_URL_BYTES = 2_048
_MODELS_MAX = 1_024
_OPTIONS_MAX = 32
_FLEET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

State = Literal["ready", "stopping"]
Option = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Announcement:
    """The entry of one worker. Lifetime: until its next heartbeat."""

    url: str  # where routers reach it
    state: State = "ready"  # "stopping": it takes no new requests
    models: tuple[str, ...] = ()  # for people: routers ask the worker itself
    kv_tokens: int | None = None  # its whole KV cache
    block_size: int | None = None  # tokens
    options: Mapping[str, Option] = field(default_factory=dict)  # more keys of a worker's line


class _AnnouncedEntry(msgspec.Struct):
    """A worker's entry as it is written in JSON; unknown fields belong to later versions and are
    ignored.
    """

    v: int
    url: str
    state: State = "ready"
    models: tuple[str, ...] = ()
    kv_tokens: int | None = None
    block_size: int | None = None
    options: dict[str, Option] = {}


def names_key(fleet: str) -> str:
    """Return the key of the set of all workers' URLs."""
    return f"warmroute:{{{fleet}}}:workers"


def entry_key(fleet: str, url: str) -> str:
    """Return the key of one worker's entry."""
    return f"warmroute:{{{fleet}}}:worker:{url}"


def check_fleet(fleet: str) -> None:
    """Raise WireError if a text cannot be the name of a fleet."""
    if not _FLEET.fullmatch(fleet):
        raise WireError(f"fleet is {fleet[:64]!r}; allowed: 1 to 64 of A-Z a-z 0-9 . _ -")


def encode_announcement(one: Announcement) -> bytes:
    """Return the entry as JSON. Raises WireError for an entry that `decode_announcement` would
    reject.
    """
    entry = _AnnouncedEntry(
        VERSION, one.url, one.state, one.models, one.kv_tokens, one.block_size, dict(one.options)
    )
    data = msgspec.json.encode(entry)
    decode_announcement(data)
    return data


def decode_announcement(data: bytes) -> Announcement:
    """Return the entry that the JSON `data` has. Raises WireError, which says what is wrong without
    repeating the text.
    """
    if len(data) > MAX_BYTES:
        raise WireError(f"the entry is larger than {MAX_BYTES} bytes")
    try:
        entry = msgspec.json.decode(data, type=_AnnouncedEntry)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"the entry is none: {error}") from error
    if entry.v != VERSION:
        raise WireError(f"the entry's version is {entry.v}; known: {VERSION}")
    if not 0 < len(entry.url.encode()) <= MAX_URL_BYTES:
        raise WireError(f"url has {len(entry.url.encode())} bytes; allowed: 1..{MAX_URL_BYTES}")
    if len(entry.models) > _MODELS_MAX or len(entry.options) > _OPTIONS_MAX:
        raise WireError(f"more than {_MODELS_MAX} models or {_OPTIONS_MAX} options")
    for name in ("kv_tokens", "block_size"):
        value = getattr(entry, name)
        if value is not None and value < 1:
            raise WireError(f"{name} is {value}; allowed: 1 or more")
    for name, option in entry.options.items():
        if isinstance(option, float) and not math.isfinite(option):
            raise WireError(f"option {name[:64]} is {option}")
    return Announcement(
        entry.url, entry.state, entry.models, entry.kv_tokens, entry.block_size, entry.options
    )

"""The prefix index as bytes, for a router that restarts: format 1, all numbers little-endian.

"KVPI", u32 version, u64 workers, u64 max_entries, u64 max_bytes, u64 evicted,
u64 entries of tier 0, 1, 2; then the entries, tier by tier:
u64 block, u16 holders (bits 0..12) and warmth (bits 14..15), u16 for each holder, ascending;
last, the XXH3-64 of everything before.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

TIERS = 3  # gpu, host, disk
Holders = dict[tuple[int, int], set[int]]  # (tier, block) -> workers

_MAGIC = b"KVPI"
_VERSION = 1
_HEADER = struct.Struct("<4sI4Q3Q")
_SUM_BYTES = 8
_LEAST_ENTRY_BYTES = 12
_HOLDERS_MASK = 0x1FFF


class Header(NamedTuple):
    """What is not an entry."""

    workers: int
    max_entries: int
    max_bytes: int
    evicted: int


def write(header: Header, holders: Holders) -> bytes:
    """The dump. The order of entries within a tier is kept: age of last use."""
    counts = [sum(tier == wanted for tier, _ in holders) for wanted in range(TIERS)]
    parts = [_HEADER.pack(_MAGIC, _VERSION, *header, *counts)]
    for (_, block), workers in sorted(holders.items(), key=lambda item: item[0][0]):
        parts.append(struct.pack(f"<QH{len(workers)}H", block, len(workers), *sorted(workers)))
    data = b"".join(parts)
    return data + xxhash.xxh3_64_intdigest(data).to_bytes(_SUM_BYTES, "little")


def read(frame: bytes) -> tuple[Header, Holders]:
    """What `write` was given. Raises ValueError for anything else, in the native words."""
    if len(frame) < _HEADER.size + _SUM_BYTES:
        raise _refusal(f"{len(frame)} bytes are too few")
    magic, version, *numbers = _HEADER.unpack_from(frame)
    header, counts = Header(*numbers[:4]), numbers[4:]
    if magic != _MAGIC:
        raise _refusal("it does not start with KVPI")
    if version != _VERSION:
        raise _refusal(f"version {version}, this program reads {_VERSION}")
    body = frame[:-_SUM_BYTES]
    if int.from_bytes(frame[-_SUM_BYTES:], "little") != xxhash.xxh3_64_intdigest(body):
        raise _refusal("its checksum is wrong")
    if not 1 <= header.workers <= 4096:
        raise _refusal("workers out of range")
    if not (1 <= header.max_entries < 1 << 63 and 1 <= header.max_bytes < 1 << 63):
        raise _refusal("a bound out of range")
    if sum(counts) > header.max_entries:
        raise _refusal("more entries than max_entries")
    if sum(counts) > (len(body) - _HEADER.size) // _LEAST_ENTRY_BYTES:
        raise _refusal("entries are missing")
    return header, _entries(body, header.workers, counts)


def _entries(body: bytes, workers: int, counts: list[int]) -> Holders:
    entries: Holders = {}
    at = _HEADER.size
    for tier, count in enumerate(counts):
        for _ in range(count):
            if len(body) - at < _LEAST_ENTRY_BYTES:
                raise _refusal("entries are missing")
            block, packed = struct.unpack_from("<QH", body, at)
            width, at = packed & _HOLDERS_MASK, at + 10
            if not 1 <= width <= workers:
                raise _refusal("an entry without a fit number of holders")
            if len(body) - at < 2 * width:
                raise _refusal("entries are missing")
            holders = list(struct.unpack_from(f"<{width}H", body, at))
            at += 2 * width
            if holders != sorted(set(holders)) or holders[-1] >= workers:
                raise _refusal("an entry whose holders are not ascending workers")
            if (tier, block) in entries:
                raise _refusal("an entry twice")
            entries[tier, block] = set(holders)
    if at != len(body):
        raise _refusal(f"{len(body) - at} bytes too many")
    return entries


def _refusal(what: str) -> ValueError:
    return ValueError(f"not a dump of a prefix index: {what}")

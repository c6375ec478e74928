"""Rewrites our engine's events into other engines' forms: arrays, and block names that are not our
hashes.

The forms follow the field order of vLLM 0.20 to 0.23 and do not use our own encoder on purpose.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx"),
)
_REMOVED = ("block_hashes", "medium", "group_idx")


def arrays_of_digests(payload: bytes) -> bytes:
    """Return the batch of KV events as arrays, with each block named by 32 bytes."""
    ts_s, events, rank = msgspec.msgpack.decode(payload)
    return msgspec.msgpack.encode([ts_s, [_array(event) for event in events], rank])


def maps_of_signed(payload: bytes) -> bytes:
    """Return the batch of KV events as maps, with each block named by a signed number."""
    ts_s, events, rank = msgspec.msgpack.decode(payload)
    for event in events:
        if "block_hashes" in event:
            event["block_hashes"] = [_signed(name) for name in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            event["parent_block_hash"] = _signed(event["parent_block_hash"])
    return msgspec.msgpack.encode([ts_s, events, rank])


def _array(event: dict[str, Any]) -> list[Any]:
    kind = event["type"]
    if kind == "AllBlocksCleared":
        return [kind]
    fields = _STORED if kind == "BlockStored" else _REMOVED
    values = {name: event.get(name) for name in fields}
    values["block_hashes"] = [_digest(name) for name in values["block_hashes"]]
    if values.get("parent_block_hash") is not None:
        values["parent_block_hash"] = _digest(values["parent_block_hash"])
    return [kind, *values.values()]


def _digest(name: int) -> bytes:
    """Return a block name of 32 bytes, the last 8 of which are another hash than ours."""
    other = xxhash.xxh3_64_intdigest(name.to_bytes(8, "little"), seed=7)
    return name.to_bytes(8, "little") * 3 + other.to_bytes(8, "big")


def _signed(name: int) -> int:
    other = xxhash.xxh3_64_intdigest(name.to_bytes(8, "little"), seed=8)
    return other - (1 << 64) if other >> 63 else other

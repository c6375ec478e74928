"""Reads the recorded batches of tests/data/kv_events, and gives events in a form that can be
compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvkernels import EventBatch
from tests.oracles import worker_blocks as event_twins

FOLDER = Path(__file__).parents[1] / "data" / "kv_events"
DECODERS = {"native": EventBatch, "twin": event_twins.EventBatch}


class Vector(NamedTuple):
    payload: bytes
    listed: list[Any]
    skipped: int


def vectors() -> dict[str, Vector]:
    """Return the recorded batches by name."""
    read = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    return {
        name: Vector(bytes.fromhex(each["payload_hex"]), each["listed"], each["skipped"])
        for name, each in read.items()
    }


def plain(listed: list[tuple[Any, ...]]) -> list[Any]:
    """Return listed events as JSON values; assert that arrays have the promised types."""
    return [[_plain(value) for value in event] for event in listed]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.dtype in (np.uint64, np.int32, np.int64)
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(each) for each in value] if isinstance(value, tuple) else value

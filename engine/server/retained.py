"""`kv_cache_retention_config` of a body: what a request says of its blocks' worth.

Fields and defaults are those of TensorRT-LLM's `KvCacheRetentionConfig` (1.0); the same comes from
Triton's clients as tensors with the names of its TensorRT-LLM backend.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.retention import DEFAULT_PRIORITY, InvalidRetention, Retention, TokenRange
from engine.server.errors import ApiError

FIELD = "kv_cache_retention_config"
_RANGES = "retention_token_range_"
# Each tensor: its datatype, the field, and whether it is one of a range's.
TENSORS = (
    (f"{_RANGES}starts", "INT32", "token_start", True),
    (f"{_RANGES}ends", "INT32", "token_end", True),
    (f"{_RANGES}priorities", "INT32", "priority", True),
    (f"{_RANGES}durations_ms", "INT32", "duration_ms", True),
    ("retention_decode_priority", "INT32", "decode_retention_priority", False),
    ("retention_decode_duration_ms", "INT32", "decode_duration_ms", False),
)
_NONE = -1  # in a tensor of ends or durations: there is none


class RangeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `token_range_retention_configs`."""

    token_start: int
    priority: int
    token_end: int | None = None
    duration_ms: float | None = None


class RetentionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole field. Lifetime: request."""

    token_range_retention_configs: list[RangeBody] = []
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: float | None = None


def retention_of(body: RetentionBody | None) -> Retention | None:
    """What it says. Raises ApiError 400."""
    if body is None:
        return None
    try:
        ranges = [
            TokenRange.of(one.token_start, one.token_end, one.priority, one.duration_ms)
            for one in body.token_range_retention_configs
        ]
        return Retention.of(ranges, body.decode_retention_priority, body.decode_duration_ms)
    except InvalidRetention as error:
        raise ApiError(400, f"{FIELD}: {error}", FIELD) from error


def from_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with the tensors among them as the one field that they stand for.

    Raises ApiError 400 unless all of the ranges' have one value a range.
    """
    found = {name: fields[name] for name, *_ in TENSORS if name in fields}
    if not found:
        return fields
    left = {name: value for name, value in fields.items() if name not in found}
    columns: dict[str, list[Any]] = {}
    config: dict[str, Any] = {}
    for name, _, field, is_range in TENSORS:
        value = found.get(name)
        if value is None:
            continue
        if not is_range:
            config[field] = value
            continue
        values = value if isinstance(value, list) else [value]
        if field in ("token_end", "duration_ms"):
            values = [None if one == _NONE else one for one in values]
        columns[field] = values
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        message = f"{_RANGES}starts, ends, priorities and durations_ms must be of one length"
        raise ApiError(400, message, f"{_RANGES}starts")
    ranges = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return left | {FIELD: config | {"token_range_retention_configs": ranges}}

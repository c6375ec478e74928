"""Profiles of engine instances: step times and KV capacity, built in by name, or from a file.

All rows are dense BF16 models. Figures are *derived* from public facts: model shapes, peak FLOPs
and bandwidth of the GPUs, and a model FLOPs utilization; calibrate them before you trust them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from engine.step_time import StepTime

SUFFIX = ".json"  # by which a profile's name is known to be a file
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one GPU type at one degree of tensor parallelism."""

    name: str
    step_time: StepTime
    kv_capacity_tokens: int
    kv_bytes_per_token: int  # over all GPUs of the instance; 0 where nobody has said
    provenance: str


def read_profile(path: Path) -> Profile:
    """The profile kept in `path` (JSON, as `write_profile` leaves it).

    Raises ValueError for a file that cannot be read or holds something else, naming the field.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"profile {path}: cannot be read: {error.strerror or error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"profile {path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.json.decode(text, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"profile {path}: {error}") from error
    if found.kv_capacity_tokens < 1:
        raise ValueError(f"profile {path}: kv_capacity_tokens must be at least 1")
    return found


def write_profile(profile: Profile, path: Path) -> None:
    """Keep `profile` in `path`; raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


_DERIVED = "derived from model shape and GPU data sheet; not measured, expect +-15 %"
_CHECKED = "derived; prefill checked: 2 % below llm-d's published 15,928 tokens/s at 8192 a chunk"
_RING_HOP_S = 10e-6  # one small all-reduce; two of them a layer under tensor parallelism


def _profile(
    name: str,
    linear_ms: float,
    comm_ms: float,
    pair_ms: float,
    weights_ms: float,
    context_us_per_1k: float,
    kv_bytes_per_token: int,
    kv_capacity_tokens: int,
    tp_layers: int,
    provenance: str = _DERIVED,
) -> Profile:
    """One row: ms per new token, per pair and per step, us per 1,000 tokens of decode context.

    `tp_layers` is the number of layers that all-reduce: 0 without tensor parallelism.
    """
    step_time = StepTime(
        linear_s=linear_ms / 1e3,
        comm_s=comm_ms / 1e3,
        comm_floor_s=2 * tp_layers * _RING_HOP_S,
        pair_s=pair_ms / 1e3,
        weights_s=weights_ms / 1e3,
        context_s=context_us_per_1k / 1e9,
    )
    return Profile(name, step_time, kv_capacity_tokens, kv_bytes_per_token, provenance)


_H = 131_072  # KV bytes a token: 2 (K, V) x layers x 8 KV heads x 128 x 2 bytes, 32 layers
_Q = 262_144  # 64 layers
_L = 327_680  # 80 layers

# name, linear, comm, pair, weights, context, KV bytes, KV tokens, all-reducing layers
_ROWS = (
    _profile("llama-3.1-8b-h100", 0.0220, 0.0, 1.18e-6, 6.2, 54, _H, 396_000, 0),
    _profile("llama-3.1-8b-h200", 0.0220, 0.0, 1.18e-6, 4.3, 38, _H, 815_000, 0),
    _profile("qwen3-32b-h100-tp2", 0.0493, 0.0048, 2.36e-6, 14.5, 54, _Q, 269_000, 64, _CHECKED),
    _profile("qwen3-32b-h200-tp2", 0.0493, 0.0048, 2.36e-6, 10.5, 38, _Q, 687_000, 64),
    _profile("qwen3-32b-h100-tp4", 0.0246, 0.0062, 1.18e-6, 7.9, 27, _Q, 787_000, 64),
    _profile("llama-3-70b-h100-tp4", 0.0540, 0.0125, 1.47e-6, 16.0, 34, _L, 399_000, 80),
    _profile("llama-3-70b-h100-tp8", 0.0270, 0.0136, 7.4e-7, 8.8, 17, _L, 1_229_000, 80),
    _profile("llama-3-70b-h200-tp4", 0.0540, 0.0125, 1.47e-6, 11.7, 24, _L, 1_069_000, 80),
    _profile("llama-3-70b-h200-tp8", 0.0270, 0.0136, 7.4e-7, 6.6, 12, _L, 2_570_000, 80),
)

PROFILES: Mapping[str, Profile] = MappingProxyType({row.name: row for row in _ROWS})


def profile(name: str) -> Profile:
    """The profile called `name`, or kept in the file `name` when it ends in .json.

    Raises ValueError: for any other name with the valid ones, for a bad file with its field.
    """
    if name in PROFILES:
        return PROFILES[name]
    if name.endswith(SUFFIX):
        return read_profile(Path(name))
    raise ValueError(
        f"unknown profile {name!r}; valid ones: {', '.join(sorted(PROFILES))}, or a {SUFFIX} file "
        "that `warmroute-sim calibrate` wrote"
    )

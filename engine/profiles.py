"""Profiles of engine instances: step times and KV capacity, built in by name, or from a file.

Most rows are dense BF16 models; DeepSeek-R1 is a mixture of experts spread over many GPUs. Figures
are *derived* from public facts: model shapes, peak FLOPs and bandwidth of the GPUs, and a model
FLOPs utilization; calibrate them before you trust them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType

import msgspec

from engine.step_time import StepTime

SUFFIX = ".json"  # by which a profile's name is known to be a file
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one GPU type at one degree of tensor or expert parallelism."""

    name: str
    step_time: StepTime
    kv_capacity_tokens: int
    kv_bytes_per_token: int  # over all GPUs of the instance; 0 where nobody has said
    provenance: str
    ranks: int = 1  # of attention data parallelism: each fills steps of its own


def gpus_of(name: str) -> int:
    """GPUs of one worker: N of a name with a part `tpN` or `epN`, as qwen3-32b-h100-tp2; else 1."""
    parts = re.split(r"[-_.]", PurePath(name).name.lower())
    degrees = [int(part[2:]) for part in parts if re.fullmatch(r"[te]p[1-9]\d{0,3}", part)]
    return degrees[-1] if degrees else 1


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

# DeepSeek-V3 and R1 (arXiv 2412.19437, tables of section 4.2): 61 layers of latent attention, 58
# of them with 256 routed experts of which a token visits 8.
_LAYERS, _MOE_LAYERS, _HIDDEN = 61, 58, 7168
_EXPERTS_B = 654.0  # thousands of millions of parameters, all routed experts
_SHARED_B = (
    17.0  # the rest, on every GPU: attention 11.4, shared experts 2.6, dense 1.2, tokens 1.8
)
_ACTIVE_EXPERTS_B = 24.1  # of a token: routed, shared, dense layers
_ACTIVE_ATTENTION_B = 11.4  # of a token: attention's projections
_KV_BYTES = _LAYERS * 576  # a token's latent and its position's part, FP8
_PREFILL_PAIR_FLOPS = _LAYERS * 128 * 2 * (192 + 128)
_DECODE_PAIR_FLOPS = _LAYERS * 128 * 2 * (576 + 512)  # on the latent itself
# One GPU of a GB200 NVL72 (data sheet, dense): FLOPs per second, bytes per second.
_FP4, _FP8, _HBM, _NVLINK, _MEMORY = 1e16, 5e15, 8e12, 9e11, 186e9
_FP4_BYTES = 0.5625  # NVFP4: half a byte, and a scale of one byte for 16 of them
_GEMM_SHARE = 0.35  # of peak: what makes 8 GPUs prefill as fast as published, below
_ATTENTION_SHARE, _HBM_SHARE, _NVLINK_SHARE = 0.45, 0.72, 0.7
_WIDE = (
    "derived from DeepSeek-V3's report and GB200's data sheet; matrix work set by the prefill that "
    "SGLang published, 26,156 tokens/s/GPU at 2,000 (lmsys.org, 2025-09-25); its 13,386 of decode "
    "on 48 GPUs then come out 1 to 2 % higher"
)


def _wide(gpus: int) -> Profile:
    """DeepSeek-R1 in NVFP4 with FP8 attention, experts over `gpus`, each GPU its own requests.

    A GPU reads its part of the experts and all of the rest in each step; a token's vector is sent
    once to each GPU with experts of its own, in FP8, and comes back in BF16.
    """
    linear_flops_s = _ACTIVE_EXPERTS_B / _FP4 + _ACTIVE_ATTENTION_B / _FP8
    weights_bytes = 1e9 * (_EXPERTS_B * _FP4_BYTES / gpus + _SHARED_B)
    visited = gpus * (1 - (1 - 1 / gpus) ** 8) * (gpus - 1) / gpus  # other GPUs, of a token
    moved_bytes = _MOE_LAYERS * _HIDDEN * 3 * visited
    read_s = _KV_BYTES / (_HBM_SHARE * _HBM)
    decode_s = max(read_s, _DECODE_PAIR_FLOPS / (_ATTENTION_SHARE * _FP8))
    step_time = StepTime(
        linear_s=2e9 * linear_flops_s / _GEMM_SHARE / gpus,
        pair_s=_PREFILL_PAIR_FLOPS / (_ATTENTION_SHARE * _FP8) / gpus,
        weights_s=weights_bytes / (_HBM_SHARE * _HBM),
        context_s=decode_s / gpus,
        comm_s=moved_bytes / (_NVLINK_SHARE * _NVLINK) / gpus,
        comm_floor_s=2 * _MOE_LAYERS * _RING_HOP_S,
        seq_s=15e-6 / gpus,
    )
    kv_bytes = gpus * (0.9 * _MEMORY - weights_bytes - 4e9)
    tokens = int(kv_bytes / _KV_BYTES)
    return Profile(f"deepseek-r1-gb200-ep{gpus}", step_time, tokens, _KV_BYTES, _WIDE, gpus)


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {row.name: row for row in (*_ROWS, *map(_wide, (4, 8, 16, 32)))}
)


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

"""Profiles of engine instances: step times and KV capacity, built in by name, or read from a file.

Most are in `profiles.json`: their kernels are fitted to tables of kernels that were measured on
such GPUs (`warmroute-sim profiles --against-aic --refit FILE`), and their CPU time follows a
published benchmark. The profiles of DeepSeek-R1 on many GB200 are derived from data sheets. Each
profile names its source. None was measured as a whole on a GPU: calibrate a profile before you
trust it to a few percent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType

import msgspec

from engine.step_time import StepTime

SUFFIX = ".json"  # by which a profile's name is known to be a file
MAX_FILE_BYTES = 1 << 20
BUILT_IN = Path(__file__).with_name("profiles.json")


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of one model on one GPU type at one degree of tensor or expert parallelism."""

    name: str
    step_time: StepTime
    kv_capacity_tokens: int
    kv_bytes_per_token: int  # over all GPUs of the instance; 0 if unknown
    provenance: str
    ranks: int = 1  # of attention data parallelism: each fills steps of its own


def gpus_of(name: str) -> int:
    """Return the number of GPUs of one worker: N if the profile's name has a part `tpN` or `epN`,
    as qwen3-32b-h100-tp2 has, else 1.
    """
    parts = re.split(r"[-_.]", PurePath(name).name.lower())
    degrees = [int(part[2:]) for part in parts if re.fullmatch(r"[te]p[1-9]\d{0,3}", part)]
    return degrees[-1] if degrees else 1


def read_profile(path: Path) -> Profile:
    """Return the profile in the JSON file `path`, which has the form that `write_profile` writes.
    Raises ValueError, which names the field, for a file that cannot be read or is invalid.
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


def write_profiles(profiles: Sequence[Profile], path: Path) -> None:
    """Write `profiles` to `path` in the format of the built-in profiles. Raises OSError if that
    fails.
    """
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profiles), indent=1) + b"\n")


def write_profile(profile: Profile, path: Path) -> None:
    """Write `profile` to `path`. Raises OSError if that fails."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


_SMALL_MESSAGE_S = 10e-6  # one exchange of a few bytes between GPUs; two of them a layer

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
_CORNER = 1.5  # soft as kernel tables have it for NVFP4 experts (1.3): all-to-alls add to reads
_WIDE = (
    "derived from DeepSeek-V3's report and GB200's data sheet; matrix work set by the prefill that "
    "SGLang published, 26,156 tokens/s/GPU at 2,000 (lmsys.org, 2025-09-25); its 13,386 of decode "
    "on 48 GPUs then come out within 2 %"
)


def _wide(gpus: int) -> Profile:
    """Return the profile of DeepSeek-R1 in NVFP4 with FP8 attention, whose experts are divided over
    `gpus`, while each GPU attends to requests of its own. In each step a GPU reads its part of the
    experts and all other weights; a token's vector is sent once to each GPU with experts of its
    own, in FP8, and comes back in BF16.
    """
    linear_flops_s = _ACTIVE_EXPERTS_B / _FP4 + _ACTIVE_ATTENTION_B / _FP8
    weights_bytes = 1e9 * (_EXPERTS_B * _FP4_BYTES / gpus + _SHARED_B)
    visited = gpus * (1 - (1 - 1 / gpus) ** 8) * (gpus - 1) / gpus  # other GPUs, of a token
    moved_bytes = _MOE_LAYERS * _HIDDEN * 3 * visited
    read_s = _KV_BYTES / (_HBM_SHARE * _HBM)
    decode_s = max(read_s, _DECODE_PAIR_FLOPS / (_ATTENTION_SHARE * _FP8))
    step_time = StepTime(
        linear_s=(2e9 * linear_flops_s / _GEMM_SHARE + moved_bytes / (_NVLINK_SHARE * _NVLINK))
        / gpus,
        pair_s=_PREFILL_PAIR_FLOPS / (_ATTENTION_SHARE * _FP8) / gpus,
        weights_s=weights_bytes / (_HBM_SHARE * _HBM) + 2 * _MOE_LAYERS * _SMALL_MESSAGE_S,
        context_s=decode_s / gpus,
        seq_s=15e-6 / gpus,
        softmax_p=_CORNER,
    )
    kv_bytes = gpus * (0.9 * _MEMORY - weights_bytes - 4e9)
    tokens = int(kv_bytes / _KV_BYTES)
    return Profile(f"deepseek-r1-gb200-ep{gpus}", step_time, tokens, _KV_BYTES, _WIDE, gpus)


def _fitted() -> list[Profile]:
    return msgspec.json.decode(BUILT_IN.read_bytes(), type=list[Profile])


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {row.name: row for row in (*_fitted(), *map(_wide, (4, 8, 16, 32)))}
)


def profile(name: str) -> Profile:
    """Return the profile called `name`, or the one in the file `name` if that ends in .json. Raises
    ValueError for an unknown name, with the valid ones, and for a bad file, with the field.
    """
    if name in PROFILES:
        return PROFILES[name]
    if name.endswith(SUFFIX):
        return read_profile(Path(name))
    raise ValueError(
        f"unknown profile {name!r}; valid ones: {', '.join(sorted(PROFILES))}, or a {SUFFIX} file "
        "that `warmroute-sim calibrate` or `warmroute-sim profile` wrote"
    )

"""The formats in which weights are stored: the bytes of a weight, and the tensor cores that
multiply it. A config.json has the format in `quantization_config`, in the terms of the tool that
quantized the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from simulator.step_times.fields import ConfigError, Fields

Arithmetic = Literal["bf16", "fp8", "int8", "fp4"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One format in which weights are stored."""

    name: str
    bytes: float  # of one weight, its share of the scales included
    arithmetic: Arithmetic  # of the matrix products, on a GPU that has it; else bf16


BF16 = Storage("bf16", 2.0, "bf16")
STORAGES: Mapping[str, Storage] = MappingProxyType(
    {
        one.name: one
        for one in (
            BF16,
            Storage("fp8", 1.0, "fp8"),
            Storage("int8", 1.0, "int8"),
            Storage("int4", 0.5 + 2 / 128, "bf16"),  # weights only; a scale for 128 of them
            Storage("nvfp4", 0.5 + 1 / 16, "fp4"),
            Storage("mxfp4", 0.5 + 1 / 32, "bf16"),  # as engines run gpt-oss: activations in BF16
        )
    }
)
INT8_WEIGHTS = Storage("int8, weights only", 1.0, "bf16")


@dataclass(frozen=True, slots=True)
class Stored:
    """The formats in which the parts of a model are stored. Embeddings and the output projection
    are always BF16.
    """

    attention: Storage = BF16
    dense: Storage = BF16
    experts: Storage = BF16


_ATTENTION = ("attn", "attention")
_DENSE = ("mlp.down_proj", "mlp.gate_proj", "mlp.gate_up_proj", "mlp.*proj", "shared_expert")
_NEITHER = ("norm", "bias", "indexer", "rotary", "router")


def read_stored(fields: Fields, layers: int) -> tuple[Stored, bool, list[str]]:
    """Return the formats in `quantization_config`, whether KV is stored in FP8, and the assumptions
    made.
    """
    storage, assumed = _format(fields)
    spared = [
        name
        for of in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
        for name in fields.texts(of)
        if not any(mark in name for mark in _NEITHER)
    ]
    attention, dense = _spares(spared, _ATTENTION, layers), _spares(spared, _DENSE, layers)
    stored = Stored(BF16 if attention else storage, BF16 if dense else storage, storage)
    if attention or dense:
        parts = [
            name for name, is_so in (("attention", attention), ("dense layers", dense)) if is_so
        ]
        assumed.append(f"weights of {' and '.join(parts)} are not quantized: BF16")
    kv = None if fields.text_or_none("kv_cache_scheme") else fields.section("kv_cache_scheme")
    kv_fp8 = "FP8" in (
        fields.text("kv_cache_quant_algo") or fields.text_or_none("kv_cache_scheme") or ""
    )
    if kv is not None:
        kv_fp8 = kv.text("type") == "float" and kv.whole("num_bits", most=64) == 8
    return stored, kv_fp8, assumed


def _spares(spared: list[str], marks: tuple[str, ...], layers: int) -> bool:
    """Return whether at least half of the layers leave the parts that `marks` name unquantized."""
    named = [name for name in spared if any(mark in name.replace("\\", "") for mark in marks)]
    numbers = {found[1] for name in named if (found := re.search(r"layers\.(\d+)", name))}
    everywhere = any(re.search(r"layers\.\d", name) is None for name in named)
    return everywhere or 2 * len(numbers) >= layers > 0


def _format(found: Fields) -> tuple[Storage, list[str]]:
    method = (found.text("quant_method") or "").lower()
    algorithm = (found.text("quant_algo") or "").upper()
    if method in ("mxfp4", "fp8", "fbgemm_fp8"):
        return STORAGES[method.removeprefix("fbgemm_")], []
    if method.startswith("modelopt") or algorithm:
        return _of_modelopt(found, algorithm or method.upper())
    if method in ("awq", "gptq", "auto-round", "gptq_marlin", "awq_marlin"):
        return _integers(found, found.whole("bits", most=64) or found.whole("w_bit", most=64)), []
    if method == "compressed-tensors":
        return _of_groups(found)
    if method == "bitsandbytes":
        return _integers(found, 8 if found.flag("load_in_8bit") else 4), []
    raise ConfigError(
        f"{found.where('quant_method')}: {method!r} is not a quantization this program knows; say "
        f"--weights: {', '.join(STORAGES)}"
    )


def _of_modelopt(found: Fields, algorithm: str) -> tuple[Storage, list[str]]:
    for mark, name in (("NVFP4", "nvfp4"), ("MXFP4", "mxfp4"), ("FP8", "fp8"), ("W4A16", "int4")):
        if mark in algorithm:
            return STORAGES[name], []
    if algorithm in ("MODELOPT_FP4", "FP4"):
        return STORAGES["nvfp4"], []
    if algorithm.startswith("MIXED") or algorithm == "MODELOPT":
        return STORAGES["fp8"], [
            "weights of mixed formats are counted as fp8; say --weights otherwise"
        ]
    raise ConfigError(
        f"{found.where('quant_algo')}: {algorithm!r} is not a format this program knows; say "
        f"--weights: {', '.join(STORAGES)}"
    )


def _integers(found: Fields, bits: int | None) -> Storage:
    if bits == 8:
        return INT8_WEIGHTS
    if bits == 4:
        return STORAGES["int4"]
    raise ConfigError(f"{found.where('bits')}: {bits}, where 4 or 8 is expected; say --weights")


def _of_groups(found: Fields) -> tuple[Storage, list[str]]:
    """Return the format that a compressed-tensors config has: that of the first group of layers
    with weights.
    """
    groups = found.section("config_groups")
    for name in groups.names() if groups is not None else ():
        group = groups.section(name) if groups is not None else None
        weights = group.section("weights") if group is not None else None
        if group is None or weights is None:
            continue
        bits, kind = weights.whole("num_bits", most=64), weights.text("type")
        alone = group.section("input_activations") is None
        if kind == "float":
            if bits == 8:
                return STORAGES["fp8"], []
            if bits == 4:
                size = weights.whole("group_size", most=1 << 20)
                return STORAGES["mxfp4" if size == 32 else "nvfp4"], []
        if kind == "int" and bits == 8 and not alone:
            return STORAGES["int8"], []
        return _integers(weights, bits), []
    raise ConfigError(
        f"{found.where('config_groups')}: no group has weights; say --weights: "
        f"{', '.join(STORAGES)}"
    )

"""Writes a small random checkpoint with tokenizer and chat template, for tests and for a first run.

It needs no network and no library beyond the router's own; the same settings and seed give the same
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.model.config import ARCHITECTURES, FILE, GENERATION_FILE

# The special tokens that the architecture's own models have, filled up to eight.
_LLAMA = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
_QWEN = ("endoftext", "im_start", "im_end")
BYTES = 256
SPECIALS = MappingProxyType(
    {
        arch: tuple(
            f"<|{name}|>" for name in (*names, *(f"spare_{i}" for i in range(8 - len(names))))
        )
        for arch, names in (("llama", _LLAMA), ("qwen2", _QWEN), ("qwen3", _QWEN))
    }
)
VOCAB = BYTES + 8

_LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_QWEN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class SpecialIds(NamedTuple):
    """The ids that begin a prompt and end an answer."""

    bos: int
    ends: tuple[int, ...]


def special_ids(arch: str) -> SpecialIds:
    """Return the special ids of `arch`, which follow the ids of the bytes."""
    if arch == "llama":
        return SpecialIds(BYTES, (BYTES + 1, BYTES + 4))
    return SpecialIds(BYTES, (BYTES + 2, BYTES))


def write_tokenizer(directory: Path, arch: str) -> None:
    """Write tokenizer.json and tokenizer_config.json with the chat template. Raises OSError."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(alphabet)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    specials = SPECIALS[arch]
    made.add_special_tokens(list(specials))
    ids = special_ids(arch)
    if arch == "llama":
        made.post_processor = processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], ids.bos)]
        )
    (directory / "tokenizer.json").write_text(made.to_str(pretty=True) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0] if arch == "llama" else None,
        "eos_token": specials[ids.ends[0] - BYTES],
        "chat_template": _LLAMA_TEMPLATE if arch == "llama" else _QWEN_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


Weight = npt.NDArray[np.float32]
ARCHS = tuple(ARCHITECTURES.values())
# As Llama 3.1's, for a model that was "trained" with 256 positions.
LLAMA3_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class TinySettings:
    """The settings of a tiny checkpoint. `rope` is the value of `rope_scaling`; empty means the
    architecture's own. Raises ValueError for an architecture or dtype that is not implemented.
    """

    arch: str = "llama"
    seed: int = 0
    layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0  # 0: hidden_size / heads; Qwen3's is twice that
    max_positions: int = 2048
    is_tied: bool | None = None  # None: as small models of the architecture are
    dtype: str = "float32"
    shards: int = 1
    rope: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"arch must be one of {', '.join(ARCHS)}, not {self.arch!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")

    @property
    def dim(self) -> int:
        """Number of elements of a head."""
        return self.head_dim or self.hidden_size // self.heads * (2 if self.arch == "qwen3" else 1)

    @property
    def ties(self) -> bool:
        """True if the embedding is also the last layer."""
        return self.arch == "qwen2" if self.is_tied is None else self.is_tied


def make_tiny(directory: Path, settings: TinySettings | None = None) -> None:
    """Write the checkpoint into `directory`, which is created; files of the same names are
    replaced. Raises OSError.
    """
    settings = settings or TinySettings()
    directory.mkdir(parents=True, exist_ok=True)
    ids = special_ids(settings.arch)
    _write_json(directory / FILE, _config(settings, ids))
    _write_json(
        directory / GENERATION_FILE, {"bos_token_id": ids.bos, "eos_token_id": list(ids.ends)}
    )
    write_tokenizer(directory, settings.arch)
    _write_weights(directory, _weights(settings), settings)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _config(settings: TinySettings, ids: Any) -> dict[str, Any]:
    rope = settings.rope or (LLAMA3_ROPE if settings.arch == "llama" else {})
    by_arch = {arch: name for name, arch in ARCHITECTURES.items()}
    return {
        "architectures": [by_arch[settings.arch]],
        "model_type": settings.arch,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": settings.max_positions,
        "rms_norm_eps": 1e-5 if settings.arch == "llama" else 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": settings.ties,
        "rope_theta": 10000.0,
        "rope_scaling": dict(rope) or None,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.ends[0],
        "torch_dtype": settings.dtype,
    }


def _weights(settings: TinySettings) -> dict[str, Weight]:
    """Return random tensors, scaled so that activations keep their size and attention is
    not flat.
    """
    draw = np.random.default_rng(settings.seed)

    def matrix(outputs: int, inputs: int) -> Weight:
        return draw.standard_normal((outputs, inputs), np.float32) / np.float32(inputs**0.5)

    def near(value: float, size: int) -> Weight:
        return np.float32(value) + draw.standard_normal(size, np.float32) / np.float32(10)

    hidden, wide = settings.hidden_size, settings.intermediate_size
    q, kv = settings.heads * settings.dim, settings.kv_heads * settings.dim
    # A quarter: where it is the last layer, too, logits stay such that sampling has a choice.
    embedding = draw.standard_normal((VOCAB, hidden), np.float32) / np.float32(4)
    made = {"model.embed_tokens.weight": embedding}
    for layer in range(settings.layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        made[f"{prefix}input_layernorm.weight"] = near(1, hidden)
        for name, outputs in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            made[f"{attention}{name}.weight"] = matrix(outputs, hidden)
            if settings.arch == "qwen2":
                made[f"{attention}{name}.bias"] = near(0, outputs)
        made[f"{attention}o_proj.weight"] = matrix(hidden, q)
        if settings.arch == "qwen3":
            made[f"{attention}q_norm.weight"] = near(1, settings.dim)
            made[f"{attention}k_norm.weight"] = near(1, settings.dim)
        made[f"{prefix}post_attention_layernorm.weight"] = near(1, hidden)
        made[f"{mlp}gate_proj.weight"] = matrix(wide, hidden)
        made[f"{mlp}up_proj.weight"] = matrix(wide, hidden)
        made[f"{mlp}down_proj.weight"] = matrix(hidden, wide)
    made["model.norm.weight"] = near(1, hidden)
    if not settings.ties:
        made["lm_head.weight"] = matrix(VOCAB, hidden)
    return made


def _write_weights(directory: Path, weights: dict[str, Weight], settings: TinySettings) -> None:
    """Write all weights into `model.safetensors`, or distribute them over shards with an index."""
    count = settings.shards
    if count == 1:
        _write_shard(directory / "model.safetensors", weights, settings.dtype)
        return
    where = {
        name: f"model-{number % count + 1:05}-of-{count:05}.safetensors"
        for number, name in enumerate(weights)
    }
    for file in sorted(set(where.values())):
        own = {name: weight for name, weight in weights.items() if where[name] == file}
        _write_shard(directory / file, own, settings.dtype)
    total = sum(weight.nbytes for weight in weights.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": where},
    )


def _write_shard(path: Path, weights: Mapping[str, Weight], dtype: str) -> None:
    """Write one file in the format of safetensors 0.8: length of the header, header padded to 8
    bytes, raw data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, at = list[bytes](), 0
    for name, weight in weights.items():
        data = _raw(weight, dtype)
        header[name] = {
            "dtype": "F32" if dtype == "float32" else "BF16",
            "shape": weight.shape,
            "data_offsets": (at, at + len(data)),
        }
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join((len(text).to_bytes(8, "little"), text, *parts)))


def _raw(weight: Weight, dtype: str) -> bytes:
    """Return the tensor's bytes in little-endian order; bfloat16 is the upper half of a float32,
    rounded to even.
    """
    if dtype == "float32":
        return weight.astype("<f4").tobytes()
    bits = weight.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()

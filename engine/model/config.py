"""The configuration of a model, without torch: checked values, shards, quantization.

`config.json` and `generation_config.json` are read and checked; features that the model does not
implement are rejected by name. Both schemas are read: transformers 5 writes `rope_parameters` and
`dtype`, older folders have `rope_theta`, `rope_scaling` and `torch_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec


class ModelError(ValueError):
    """Raised for a model that cannot be served; the message has the file, the field, and what to
    do.
    """

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        super().__init__(f"{path}: {what}; {remedy}")
        self.path = path


T = TypeVar("T")
AGAIN = "fetch the model again, or point to another folder"


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the file `path`. Raises ModelError if the file cannot be read,
    exceeds `max_bytes`, or has no JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(path, f"cannot be read: {error.strerror or error}", AGAIN) from error
    if len(text) > max_bytes:
        raise ModelError(path, f"larger than {max_bytes} bytes", AGAIN)
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(path, f"is no JSON object: {error}", AGAIN) from error


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object in a file, whose fields are read with type and range checked; null counts as
    absent. Every method that reads a field raises ModelError, which names file and field.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""  # of the names in errors, for objects within objects

    def refuse(self, name: str, what: str, remedy: str) -> ModelError:
        """Return an error that says what is wrong with the field `name`, and how to remedy it."""
        return ModelError(self.path, f"{self.prefix}{name} {what}", remedy)

    def has(self, name: str) -> bool:
        """Return whether the field exists and is not null."""
        return self.values.get(name) is not None

    def _value(self, name: str, default: T | None, fits: Callable[[Any], bool], what: str) -> T:
        """Return the field after checking it, or `default` if the field is absent. A field without
        a default must exist.
        """
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.refuse(name, "is missing", AGAIN)
            return default
        if not fits(value):
            raise self.refuse(name, f"must be {what}, is {value!r:.80}", AGAIN)
        checked: T = value
        return checked

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return the field as an int in low..high, or `default` if it is absent. A field without a
        default must exist.
        """
        return self._value(
            name, default, lambda value: _is_int(value, low, high), f"an int in {low}..{high}"
        )

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Return the field as a float in low..high, or `default` if it is absent. A field without a
        default must exist.
        """

        def fits(value: Any) -> bool:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and low <= value <= high

        return float(self._value(name, default, fits, f"a number in {low:g}..{high:g}"))

    def flag(self, name: str, default: bool) -> bool:
        """Return the field as a bool, or `default` if it is absent."""
        return self._value(name, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, name: str, default: str = "") -> str:
        """Return the field as a string, or `default` if it is absent."""
        return self._value(name, default, lambda value: isinstance(value, str), "a string")

    def within(self, name: str) -> Fields:
        """Return the object in the field `name`; an empty one if it is absent."""
        empty: dict[str, Any] = {}
        value = self._value(name, empty, lambda value: isinstance(value, dict), "an object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def ids(self, name: str, vocab: int) -> tuple[int, ...]:
        """Return the token ids in the field, which holds one id or a list of at most 256; an absent
        field has none.
        """
        value = self.values.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_int(item, 0, vocab - 1) for item in listed):
            raise self.refuse(name, f"must be ids in 0..{vocab - 1}, is {value!r:.80}", AGAIN)
        if len(listed) > 256:
            raise self.refuse(name, f"has {len(listed)} ids, at most 256 are read", AGAIN)
        return tuple(listed)


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


OTHER = "serve a model without it, or another engine"


def _refuse_unsupported(fields: Fields, arch: str) -> None:
    """Raise ModelError for features that are not implemented: quantized weights, experts, sliding
    windows, other activations.
    """
    if fields.has("quantization_config"):
        method = fields.within("quantization_config").text("quant_method", "unknown")
        raise fields.refuse(
            "quantization_config", f"asks for {method} weights", "serve the unquantized checkpoint"
        )
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if fields.has(name):
            raise fields.refuse(name, "asks for a mixture of experts", OTHER)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.refuse("hidden_act", f"is {activation!r:.40}, only silu is built", OTHER)
    _refuse_sliding(fields, arch)


def _refuse_sliding(fields: Fields, arch: str) -> None:
    """Raise ModelError if the model has layers with sliding windows. They are found as in
    transformers 5.23: by name, or else after `max_window_layers`.
    """
    listed = fields.values.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or set(map(str, listed)) - {"full_attention"}:
            raise fields.refuse("layer_types", "names other than full_attention", OTHER)
        return
    if arch == "llama":
        is_sliding = fields.has("sliding_window")
    else:
        layers = fields.integer("num_hidden_layers", 1, 1 << 20)
        first = fields.integer("max_window_layers", 0, 1 << 20, 28)
        is_sliding = (
            fields.flag("use_sliding_window", False)
            and fields.has("sliding_window")
            and first < layers
        )
    if is_sliding:
        raise fields.refuse("sliding_window", "asks for sliding-window attention", OTHER)


KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings of rotary embeddings, with the names of transformers. Fields that a kind of
    embedding does not use have their defaults.
    """

    kind: str  # one of KINDS
    theta: float
    factor: float = 1.0
    original_positions: int = 0  # positions that the model was trained with
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def read_rope(fields: Fields, max_positions: int, head_dim: int) -> RopeConfig:
    """Return the rotary settings, which may be in either schema. Raises ModelError for kinds that
    are not implemented.
    """
    if fields.has("rope_parameters"):
        rope = fields.within("rope_parameters")
        theta = rope if rope.has("rope_theta") else fields
    else:
        rope = fields.within("rope_scaling")
        theta = fields if fields.has("rope_theta") else rope
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.refuse("rope_parameters", "differs by layer type", "serve another model")
    name = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(name, "default")
    if kind not in KINDS:
        raise rope.refuse(name, f"{kind!r:.40} is not built", f"built are {', '.join(KINDS)}")
    for holder in (rope, fields):
        if holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise holder.refuse(
                "partial_rotary_factor", "below 1 is not built", "serve another model"
            )
    base = theta.number("rope_theta", 2.0, 1e12, 10000.0)
    if kind == "default":
        return RopeConfig("default", base, original_positions=max_positions)
    number = rope.number
    # Dynamic scaling counts from max_position_embeddings, whatever other fields say.
    trained = max_positions if kind in ("dynamic", "linear") else rope.integer(
        "original_max_position_embeddings", 1, 1 << 27, max_positions
    )  # fmt: skip
    config = RopeConfig(
        kind=kind,
        theta=base,
        factor=number("factor", 1.0, MAX_FACTOR),
        original_positions=trained,
        low_freq_factor=number("low_freq_factor", 1e-3, MAX_FACTOR, 1.0),
        high_freq_factor=number("high_freq_factor", 1e-3, MAX_FACTOR, 4.0),
        beta_fast=number("beta_fast", 1e-3, MAX_FACTOR, 32.0),
        beta_slow=number("beta_slow", 1e-3, MAX_FACTOR, 1.0),
        attention_factor=(
            number("attention_factor", 1e-3, MAX_FACTOR) if rope.has("attention_factor") else None
        ),
        mscale=number("mscale", 0.0, MAX_FACTOR, 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0, MAX_FACTOR, 0.0),
        truncate=rope.flag("truncate", True),
    )
    if kind == "llama3" and config.high_freq_factor <= config.low_freq_factor:
        raise rope.refuse("high_freq_factor", "must be above low_freq_factor", AGAIN)
    if kind == "dynamic" and head_dim < 4:
        raise rope.refuse("rope_type", f"dynamic needs a head_dim above 2, not {head_dim}", AGAIN)
    return config


WEIGHTS = ("none", "int8", "int8-all")
KV_DTYPES = ("auto", "int8", "fp8")
KV_ALIGNMENT_BYTES = 16  # a token's row of a head begins there: what kernels read at once
SCALE_BYTES = 4  # float32, of weights and of KV


@dataclass(frozen=True, slots=True)
class Quantization:
    """The parts of a model that are quantized when it loads.

    Lifetime: worker. With `weights` int8 these are the matrices of the layers; with int8-all the
    embedding and the last layer, too. With `kv` auto, K and V keep the model's own dtype. Raises
    ValueError, which names the setting, for an unknown value.
    """

    weights: str = "none"
    kv: str = "auto"

    def __post_init__(self) -> None:
        for setting, value, known in (
            ("quantize", self.weights, WEIGHTS),
            ("kv_dtype", self.kv, KV_DTYPES),
        ):
            if value not in known:
                raise ValueError(f"{setting} must be one of {', '.join(known)}, not {value!r:.40}")

    def covers(self, name: str) -> bool:
        """Return whether the tensor `name` is stored as INT8."""
        if self.weights == "none":
            return False
        if name in (EMBEDDING, HEAD):
            return self.weights == "int8-all"
        return name.endswith("_proj.weight")

    def weight_bytes(self, name: str, shape: tuple[int, ...], dtype_bytes: int) -> int:
        """Return the bytes of the tensor `name` with its scales, in a model of `dtype_bytes` an
        element.
        """
        elements = prod(shape)
        if not self.covers(name):
            return elements * dtype_bytes
        return elements + shape[0] * SCALE_BYTES

    def head_bytes(self, head_dim: int, dtype_bytes: int) -> int:
        """Return the bytes of one token's K, or V, of one head, with its scale."""
        return head_dim * dtype_bytes if self.kv == "auto" else head_dim + SCALE_BYTES


PLAIN = Quantization()


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one process has: rank `tp_rank` of `tp_size` in every layer, and
    stage `pp_rank` of `pp_size` of the layers. Raises ValueError for ranks outside their sizes.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("tensor", self.tp_rank, self.tp_size),
            ("pipeline", self.pp_rank, self.pp_size),
        ):
            if not 0 <= rank < size:
                raise ValueError(f"{name}-parallel rank {rank} is outside 0..{size - 1}")

    def layers(self, total: int) -> range:
        """Return the layers of this stage out of `total`; stages differ by at most one layer."""
        return range(
            total * self.pp_rank // self.pp_size, total * (self.pp_rank + 1) // self.pp_size
        )

    def part(self, total: int) -> slice:
        """Return this rank's equal part of 0..`total`, which `tp_size` divides."""
        share = total // self.tp_size
        return slice(self.tp_rank * share, (self.tp_rank + 1) * share)

    def kv_heads(self, total: int) -> slice:
        """Return this rank's KV heads out of `total`; if there are more ranks than heads, ranks
        share a head.
        """
        if total >= self.tp_size:
            return self.part(total)
        head = self.tp_rank * total // self.tp_size
        return slice(head, head + 1)

    @property
    def is_first(self) -> bool:
        """True if the stage of this shard embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """True if the stage of this shard computes the logits."""
        return self.pp_rank == self.pp_size - 1


MAX_FILE_BYTES = 1 << 20
FILE, GENERATION_FILE = "config.json", "generation_config.json"
DTYPE_BYTES = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_WIDTH = 1024, 1024, 512, 1 << 20
MAX_VOCAB, MAX_POSITIONS = 1 << 22, 1 << 24
# The names of the architectures, and how each differs from Llama.
ARCHITECTURES = MappingProxyType(
    {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling parameters in `generation_config.json`; a parameter that the file does not have
    is None.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer like Llama; sizes are in elements."""

    path: Path  # of config.json
    arch: str  # llama, qwen2 or qwen3
    vocab: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    is_tied: bool  # the embedding is the last layer, too
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # queries and keys are normalized by head, before the rotation
    dtype: str  # of the weights: a key of DTYPE_BYTES
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]  # any of them ends an answer
    sampling: SamplingDefaults

    def kv_bytes_per_token(
        self, dtype: str, shard: Shard | None = None, quantization: Quantization = PLAIN
    ) -> int:
        """Return the bytes of K and V, with scales, of one token in one shard's cache."""
        shard = shard or Shard()
        own = shard.kv_heads(self.kv_heads)
        heads = int(own.stop - own.start)
        layers = len(shard.layers(self.layers))
        return 2 * layers * heads * quantization.head_bytes(self.head_dim, DTYPE_BYTES[dtype])

    def check_shard(self, shard: Shard) -> None:
        """Raise ModelError unless heads and widths can be divided among the ranks."""
        size = shard.tp_size
        for name, value in (
            ("num_attention_heads", self.heads),
            ("intermediate_size", self.intermediate_size),
        ):
            if value % size:
                raise ModelError(
                    self.path,
                    f"{name} {value} cannot be cut into {size} equal parts",
                    f"choose a tensor-parallel size that divides {value}",
                )
        if self.kv_heads % size and size % self.kv_heads:
            raise ModelError(
                self.path,
                f"{self.kv_heads} KV heads cannot be spread over {size} ranks",
                "choose a tensor-parallel size that divides them, or a multiple of them",
            )
        if shard.pp_size > self.layers:
            raise ModelError(
                self.path,
                f"{self.layers} layers are fewer than {shard.pp_size} stages",
                f"choose at most {self.layers} stages",
            )


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration of the model in a Hugging Face folder. Raises ModelError with the
    file, the field, and what to do.
    """
    if not directory.is_dir():
        raise ModelError(directory, "is no folder", "give the folder that has config.json")
    path = directory / FILE
    fields = Fields(path, read_object(path, MAX_FILE_BYTES))
    arch = _arch(fields)
    _refuse_unsupported(fields, arch)
    integer = fields.integer
    vocab = integer("vocab_size", 2, MAX_VOCAB)
    hidden_size = integer("hidden_size", 1, MAX_WIDTH)
    heads = integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = integer("num_key_value_heads", 1, MAX_HEADS, heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"{kv_heads} does not divide {heads}", AGAIN)
    head_dim = integer(
        "head_dim", 2, MAX_HEAD_DIM, 128 if arch == "qwen3" else hidden_size // heads
    )
    if head_dim % 2 or head_dim < 2:
        raise fields.refuse("head_dim", f"{head_dim} cannot be rotated in halves", AGAIN)
    max_positions = integer("max_position_embeddings", 1, MAX_POSITIONS)
    attention_bias = fields.flag("attention_bias", False)
    bos_ids, eos_ids, sampling = _generation(directory, fields, vocab)
    return ModelConfig(
        path=path,
        arch=arch,
        vocab=vocab,
        hidden_size=hidden_size,
        intermediate_size=integer("intermediate_size", 1, MAX_WIDTH),
        layers=integer("num_hidden_layers", 1, MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=read_rope(fields, max_positions, head_dim),
        is_tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=arch == "qwen2" or attention_bias,
        o_bias=arch != "qwen2" and attention_bias,
        mlp_bias=arch == "llama" and fields.flag("mlp_bias", False),
        qk_norm=arch == "qwen3",
        dtype=_dtype(fields),
        bos_ids=bos_ids,
        eos_ids=eos_ids,
        sampling=sampling,
    )


def _arch(fields: Fields) -> str:
    named = fields.values.get("architectures")
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        arch = ARCHITECTURES.get(named[0])
        shown = named[0]
    else:
        shown = fields.text("model_type")
        arch = shown if shown in ARCHITECTURES.values() else None
    if arch is None:
        kind = "a mixture of experts, " if "moe" in shown.lower() or "Mixtral" in shown else ""
        raise fields.refuse(
            "architectures",
            f"is {kind}{shown!r:.80}, which is not built",
            f"serve one of {', '.join(ARCHITECTURES)}",
        )
    return arch


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise fields.refuse(name, f"is {dtype!r:.80}", f"serve weights of {', '.join(DTYPE_BYTES)}")
    return dtype


def _generation(
    directory: Path, fields: Fields, vocab: int
) -> tuple[tuple[int, ...], tuple[int, ...], SamplingDefaults]:
    """Return the ids that begin a prompt, the ids that end an answer, and the sampling defaults;
    `generation_config.json` takes precedence if it exists.
    """
    bos_ids, eos_ids = fields.ids("bos_token_id", vocab), fields.ids("eos_token_id", vocab)
    path = directory / GENERATION_FILE
    if not path.exists():
        return bos_ids, eos_ids, SamplingDefaults()
    generation = Fields(path, read_object(path, MAX_FILE_BYTES))

    def number(name: str, high: float) -> float | None:
        return generation.number(name, 0.0, high) if generation.has(name) else None

    sampling = SamplingDefaults(
        # Without do_sample the temperature is not used: the answer is the likeliest one.
        temperature=number("temperature", 100.0) if generation.flag("do_sample", False) else None,
        top_p=number("top_p", 1.0),
        top_k=generation.integer("top_k", -1, MAX_VOCAB) if generation.has("top_k") else None,
        min_p=number("min_p", 1.0),
        repetition_penalty=number("repetition_penalty", 100.0),
    )
    return (
        generation.ids("bos_token_id", vocab) or bos_ids,
        generation.ids("eos_token_id", vocab) or eos_ids,
        sampling,
    )

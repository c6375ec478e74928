"""What a model is: `config.json` and `generation_config.json` read, checked, or refused by name.

Both schemas are read: transformers 5 writes `rope_parameters` and `dtype`, older folders have
`rope_theta`, `rope_scaling` and `torch_dtype`. Defaults are those of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine.model.errors import ModelError
from engine.model.json_file import AGAIN, Fields, read_object
from engine.model.quantization import PLAIN, Quantization
from engine.model.refusals import refuse_what_is_not_built
from engine.model.rope_config import RopeConfig, read_rope
from engine.model.shard import Shard

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
    """What `generation_config.json` says of sampling; None where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer of Llama's kind. Sizes in elements."""

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
        """Bytes of K and V, scales included, that one token takes in one shard's cache."""
        shard = shard or Shard()
        own = shard.kv_heads(self.kv_heads)
        heads = int(own.stop - own.start)
        layers = len(shard.layers(self.layers))
        return 2 * layers * heads * quantization.head_bytes(self.head_dim, DTYPE_BYTES[dtype])

    def check_shard(self, shard: Shard) -> None:
        """Raise ModelError unless the heads and widths can be cut that way."""
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
    """The model in a Hugging Face folder. Raises ModelError: file, field, what to do."""
    if not directory.is_dir():
        raise ModelError(directory, "is no folder", "give the folder that has config.json")
    path = directory / FILE
    fields = Fields(path, read_object(path, MAX_FILE_BYTES))
    arch = _arch(fields)
    refuse_what_is_not_built(fields, arch)
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
    """First ids, last ids and sampling; `generation_config.json` has the last word where it is."""
    bos_ids, eos_ids = fields.ids("bos_token_id", vocab), fields.ids("eos_token_id", vocab)
    path = directory / GENERATION_FILE
    if not path.exists():
        return bos_ids, eos_ids, SamplingDefaults()
    said = Fields(path, read_object(path, MAX_FILE_BYTES))

    def number(name: str, high: float) -> float | None:
        return said.number(name, 0.0, high) if said.has(name) else None

    sampling = SamplingDefaults(
        # Without do_sample the temperature is not used: the answer is the likeliest one.
        temperature=number("temperature", 100.0) if said.flag("do_sample", False) else None,
        top_p=number("top_p", 1.0),
        top_k=said.integer("top_k", -1, MAX_VOCAB) if said.has("top_k") else None,
        min_p=number("min_p", 1.0),
        repetition_penalty=number("repetition_penalty", 100.0),
    )
    return (
        said.ids("bos_token_id", vocab) or bos_ids,
        said.ids("eos_token_id", vocab) or eos_ids,
        sampling,
    )

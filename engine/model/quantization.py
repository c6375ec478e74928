"""What of a model is kept in fewer bits: which weights, and the KV cache. No torch here.

INT8 weights have one scale per output channel, symmetric about zero (absmax / 127), as W8A16 in
TensorRT-LLM's INT8 weight-only mode. A quantized KV cache has one scale per token and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.names import EMBEDDING, HEAD

WEIGHTS = ("none", "int8", "int8-all")
KV_DTYPES = ("auto", "int8", "fp8")
KV_ALIGNMENT_BYTES = 16  # a token's row of a head begins there: what kernels read at once
SCALE_BYTES = 4  # float32, of weights and of KV


@dataclass(frozen=True, slots=True)
class Quantization:
    """What to quantize when a model loads. Lifetime: worker.

    `weights` int8: the matrices of the layers; int8-all: the embedding and the last layer, too.
    `kv` auto: the model's own dtype. Raises ValueError naming the setting.
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
        """Whether the tensor `name` is kept as INT8."""
        if self.weights == "none":
            return False
        if name in (EMBEDDING, HEAD):
            return self.weights == "int8-all"
        return name.endswith("_proj.weight")

    def weight_bytes(self, name: str, shape: tuple[int, ...], dtype_bytes: int) -> int:
        """Bytes of the tensor `name`, scales included, in a model of `dtype_bytes` an element."""
        elements = 1
        for size in shape:
            elements *= size
        if not self.covers(name):
            return elements * dtype_bytes
        return elements + shape[0] * SCALE_BYTES

    def head_bytes(self, head_dim: int, dtype_bytes: int) -> int:
        """Bytes of one token's K, or V, of one head, its scale included."""
        return head_dim * dtype_bytes if self.kv == "auto" else head_dim + SCALE_BYTES


PLAIN = Quantization()

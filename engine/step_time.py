"""How long one engine step takes: a roofline with soft corners.

    t = overhead + seq * sequences + soft_max(weights, linear * new_tokens)
      + pair * attention_pairs + context * decode_ctx_tokens
      + soft_max(comm_floor, comm * new_tokens)

`linear` is the matrix work of one token at the sustained share of peak FLOPs, `weights` one
read of all weights, `pair` the attention of one query on one key, `context` one token of KV
read by a decode, `comm` the all-reduces of tensor parallelism. soft_max is the p-norm: exact
far from the corner where weights and compute take equally long, smooth across it. (Roofline:
Williams et al., 2009; per-operator form and constants: Vidur, Agrawal et al., 2024.)

Import-light on purpose: routers calibrate against it without the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Protocol

CHUNK_TOKENS = 8192  # prefill tokens a step takes at most, where a whole prompt is priced


class StepLoad(Protocol):
    """What a step costs by; `engine.scheduler.scheduler.Step` is one."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all prefill chunks."""

    @property
    def prefill_seqs(self) -> int:
        """Prefill chunks."""

    @property
    def decode_seqs(self) -> int:
        """Requests that get one token of decode."""

    @property
    def decode_ctx_tokens(self) -> int:
        """KV tokens that the decodes read."""

    @property
    def attention_pairs(self) -> float:
        """Sum over chunks of chunk * (context before + chunk / 2)."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Constants of one engine instance, all its GPUs together; none is negative.

    Raises ValueError for a negative or infinite constant and for softmax_p below 1.
    """

    linear_s: float  # seconds per new token
    pair_s: float  # seconds per (query, key) pair of prefill attention
    weights_s: float  # seconds per step
    context_s: float  # seconds per KV token read by decodes
    comm_s: float = 0.0  # seconds per new token
    comm_floor_s: float = 0.0  # seconds per step, small messages
    overhead_s: float = 0.002  # seconds per step: launch, scheduling, sampling
    seq_s: float = 15e-6  # seconds per sequence of the batch
    softmax_p: float = 6.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not (isfinite(value) and value >= 0.0):
                raise ValueError(f"{entry.name} must be finite and at least 0, got {value}")
        if self.softmax_p < 1.0:
            raise ValueError(f"softmax_p must be at least 1, got {self.softmax_p}")

    def seconds(self, step: StepLoad) -> float:
        """Seconds that `step` takes."""
        return self._seconds(
            step.prefill_tokens + step.decode_seqs,
            step.prefill_seqs + step.decode_seqs,
            step.attention_pairs,
            step.decode_ctx_tokens,
        )

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to prefill `new_tokens` behind `cached_tokens`, alone, in 8192-token chunks."""
        if new_tokens < 0 or cached_tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {new_tokens} and {cached_tokens}")
        whole, rest = divmod(new_tokens, CHUNK_TOKENS)
        # Attention is the same however the prompt is cut, so it is priced once for all chunks.
        total_s = self.pair_s * new_tokens * (cached_tokens + new_tokens / 2)
        total_s += whole * self._seconds(CHUNK_TOKENS, 1, 0.0, 0)
        if rest:
            total_s += self._seconds(rest, 1, 0.0, 0)
        return total_s

    def decode_step_s(self, seqs: int, ctx_tokens: int) -> float:
        """Seconds of a step that decodes `seqs` requests over `ctx_tokens` of KV in all."""
        if seqs < 0 or ctx_tokens < 0:
            raise ValueError(f"seqs and ctx_tokens must be at least 0, got {seqs}, {ctx_tokens}")
        return self._seconds(seqs, seqs, 0.0, ctx_tokens)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of one full chunk on an empty context."""
        return CHUNK_TOKENS / self.prefill_s(CHUNK_TOKENS)

    def _seconds(self, new_tokens: int, seqs: int, pairs: float, ctx_tokens: int) -> float:
        return (
            self.overhead_s
            + self.seq_s * seqs
            + _soft_max(self.weights_s, self.linear_s * new_tokens, self.softmax_p)
            + self.pair_s * pairs
            + self.context_s * ctx_tokens
            + _soft_max(self.comm_floor_s, self.comm_s * new_tokens, self.softmax_p)
        )


def _soft_max(left: float, right: float, p: float) -> float:
    """(left^p + right^p)^(1/p), scaled by the larger so that no power underflows."""
    high, low = (left, right) if left >= right else (right, left)
    if high == 0.0:
        return 0.0
    return float(high * (1.0 + (low / high) ** p) ** (1.0 / p))

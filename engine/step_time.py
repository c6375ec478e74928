"""Step time model: a roofline with a soft corner predicts how long one engine step takes.

    kernels = soft_max(weights + experts * touched, linear * new_tokens)
            + pair * attention_pairs + context * decode_ctx_tokens
    touched = 1 - (1 - expert_share) ^ new_tokens
    t       = kernels + overhead + seq * sequences

`linear` is the matrix work of one token at the sustained share of peak FLOPs, `weights` one read
of all weights that every token uses, `experts` one read of all routed experts, of which each token
visits `expert_share` at random, `pair` the attention of one query on one key, `context` one token
of KV read by a decode. All-reduces of tensor parallelism are part of `linear` and `weights`: their
time has the same shape. `overhead` and `seq` are CPU time: scheduling, launches, sampling.

soft_max is the p-norm: exact far from the corner where weights and compute take equally long,
smooth across it. With p = 1 it is the sum; below 1 it exceeds the sum near the corner, as grouped
GEMMs do whose experts get a few rows each. (Roofline: Williams et al., 2009; per-operator form:
Vidur, Agrawal et al., 2024; that measured kernels ask for these terms and no others:
docs/notes/step-times.md.)

Import-light on purpose: routers calibrate against it without the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Protocol

LEAST_P = 0.25  # of the soft maximum: at its corner then 8 times the sum
CHUNK_TOKENS = 8192  # prefill tokens a step takes at most, where a whole prompt is priced


class StepLoad(Protocol):
    """The quantities of a step that determine its time; `engine.scheduler.scheduler.Step`
    has them.
    """

    @property
    def prefill_tokens(self) -> int:
        """The number of tokens of all prefill chunks."""

    @property
    def prefill_seqs(self) -> int:
        """The number of prefill chunks."""

    @property
    def decode_seqs(self) -> int:
        """The number of requests that get one token of decode."""

    @property
    def decode_ctx_tokens(self) -> int:
        """The number of KV tokens that the decodes read."""

    @property
    def attention_pairs(self) -> float:
        """The sum of chunk * (context before + chunk / 2) over all chunks."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step time model of one engine instance, with constants for all its GPUs together. Raises
    ValueError for a negative or infinite constant, for an expert_share above 1, and for softmax_p
    below `LEAST_P`.
    """

    linear_s: float  # seconds per new token
    pair_s: float  # seconds per (query, key) pair of prefill attention
    weights_s: float  # seconds per step
    context_s: float  # seconds per KV token read by decodes
    experts_s: float = 0.0  # seconds per step whose tokens visit all routed experts
    expert_share: float = 0.0  # of the routed experts that one token visits, 0 to 1
    overhead_s: float = 0.002  # seconds per step of CPU time: launch, scheduling, sampling
    seq_s: float = 15e-6  # seconds per sequence of the batch, of CPU time
    softmax_p: float = 6.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not (isfinite(value) and value >= 0.0):
                raise ValueError(f"{entry.name} must be finite and at least 0, got {value}")
        if self.expert_share > 1.0:
            raise ValueError(f"expert_share must be at most 1, got {self.expert_share}")
        if self.softmax_p < LEAST_P:
            raise ValueError(f"softmax_p must be at least {LEAST_P}, got {self.softmax_p}")

    def seconds(self, step: StepLoad) -> float:
        """Return the modelled seconds that `step` takes."""
        return self._seconds(
            step.prefill_tokens + step.decode_seqs,
            step.prefill_seqs + step.decode_seqs,
            step.attention_pairs,
            step.decode_ctx_tokens,
        )

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the seconds to prefill `new_tokens` after `cached_tokens`, in 8192-token chunks,
        if nothing else runs.
        """
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
        """Return the seconds of a step that decodes `seqs` requests over `ctx_tokens` of
        KV in all.
        """
        if seqs < 0 or ctx_tokens < 0:
            raise ValueError(f"seqs and ctx_tokens must be at least 0, got {seqs}, {ctx_tokens}")
        return self._seconds(seqs, seqs, 0.0, ctx_tokens)

    def read_s(self, new_tokens: int) -> float:
        """Return the seconds to read the weights that `new_tokens` use: all shared weights, and
        those of the experts that the tokens visit. Tokens choose experts independently and evenly,
        so n tokens visit an expert with a probability of 1 - (1 - expert_share)^n.
        """
        untouched = (1.0 - self.expert_share) ** new_tokens
        return self.weights_s + self.experts_s * (1.0 - untouched)

    @property
    def convex(self) -> StepTime:
        """Return a step time that is convex in the tokens and nowhere above this one. It counts the
        experts that one token visits, and takes no soft maximum above the sum.
        """
        return replace(
            self,
            weights_s=self.read_s(1),
            experts_s=0.0,
            softmax_p=max(1.0, self.softmax_p),
        )

    @property
    def kernels(self) -> StepTime:
        """Return a step time that has the kernels of this one and no CPU time."""
        return replace(self, overhead_s=0.0, seq_s=0.0)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prefill rate of one full chunk without context, in tokens per second."""
        return CHUNK_TOKENS / self.prefill_s(CHUNK_TOKENS)

    def _seconds(self, new_tokens: int, seqs: int, pairs: float, ctx_tokens: int) -> float:
        return (
            self.overhead_s
            + self.seq_s * seqs
            + _soft_max(self.read_s(new_tokens), self.linear_s * new_tokens, self.softmax_p)
            + self.pair_s * pairs
            + self.context_s * ctx_tokens
        )


def _soft_max(left: float, right: float, p: float) -> float:
    """Return (left^p + right^p)^(1/p), computed relative to the larger argument so that no power
    underflows.
    """
    high, low = (left, right) if left >= right else (right, left)
    if high == 0.0:
        return 0.0
    return float(high * (1.0 + (low / high) ** p) ** (1.0 / p))

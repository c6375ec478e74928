"""Rotary position embeddings: the inverse frequencies of each kind, a table of cosines and sines,
and the rotation.

Formulas: RoFormer (Su et al. 2021); linear (kaiokendev 2023); dynamic NTK (bloc97 and emozilla
2023); YaRN (Peng et al. 2023); llama3 (Meta, Llama 3.1), as in transformers 5.23. Frequencies are
computed in float64 whatever dtype the weights have.
"""

from __future__ import annotations

import math

import torch

from engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_tokens: int) -> torch.Tensor:
    """Return float64[head_dim / 2]: the radians by which each position turns, for sequences of up
    to `max_tokens`.

    Dynamic scaling depends on the length of a sequence. Cached keys keep the rotation that they
    were written with, so the scaling for the longest sequence that is served applies to all: none
    up to the trained length.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    theta = rope.theta
    if rope.kind == "dynamic":
        longest = max(max_tokens, rope.original_positions) / rope.original_positions
        theta *= (rope.factor * longest - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    plain = theta**-exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor by which cosines and sines are multiplied; it is 1 except for yarn."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Return the frequencies of Llama 3.1: long wavelengths are divided by the factor, short ones
    are kept, and a ramp lies between.
    """
    turns = rope.original_positions * plain / (2 * math.pi)  # within the trained length
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the frequencies of YaRN: dimensions of many turns are kept, those of few turns are
    divided by the factor, and a ramp lies between.
    """

    def dimension(turns: float) -> float:
        ratio = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    dims = torch.arange(head_dim // 2, dtype=torch.float64)
    divided = ((dims - low) / (high - low)).clamp(0, 1)
    return divided * plain / rope.factor + (1 - divided) * plain


class Rotary:
    """The cosines and sines of all positions below `max_tokens`. Lifetime: model. `cos` and `sin`
    are [max_tokens, head_dim / 2], in float64 if the model is in float64, else in float32.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_tokens: int, device: str, dtype: torch.dtype
    ) -> None:
        frequencies = inverse_frequencies(rope, head_dim, max_tokens)
        angles = torch.arange(max_tokens, dtype=torch.float64)[:, None] * frequencies
        scale = attention_factor(rope)
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        self.cos = (angles.cos() * scale).to(device, kept)
        self.sin = (angles.sin() * scale).to(device, kept)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines [T, 1, head_dim / 2] of `positions` int64[T]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` [T, heads, head_dim] rotated in halves (dimension i with i + head_dim / 2), in its
    dtype.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

"""What attention adds to a prefill token for each token before it, learned from prefill times.

A prefill of n tokens after h takes n * (a + q * (h + n / 2)) seconds, so time per token is a line
over x = h + n / 2 (FLOP count of a causal transformer; Vidur, Agrawal et al., 2024, measures the
same form). Its slope over its height is fitted by least squares of the relative error, the past
fading, by two running sums of each kind (recursive least squares with forgetting).
"""

from __future__ import annotations

_FADE = 0.995  # of the past at each sample
_PRIOR = 4.0  # samples that believe in no attention at all, far from zero context
_PRIOR_TOKENS = 8_192.0
_PAIR_MAX = 1e-2  # tokens of linear work; a model of 100 dimensions would not reach it
_OUTLIER = 2.0  # a sample counts as at most so many times quicker or slower than expected
_SAMPLE_MAX = 100.0  # times longer per token than expected: not a prefill's doing


class PairCost:
    """Lifetime: process. All workers together: their speeds are taken out before."""

    def __init__(self) -> None:
        # Normal equations of 1 = a * u + q * v with u = 1 / y and v = x / y.
        self._uu = self._uv = self._vv = self._u = self._v = 0.0
        for x in (0.0, _PRIOR_TOKENS):
            self._add(1.0, x, _PRIOR / 2)
        self.pair_tokens = 0.0

    def work(self, tokens: float, cached: float) -> float:
        """Linear work of computing `tokens` after `cached` ones, their attention included."""
        return tokens * (1.0 + self.pair_tokens * (cached + tokens * 0.5))

    def prefill(self, tokens: int, cached: int, linear_tokens: float) -> None:
        """`tokens` after `cached` ones took as long as `linear_tokens` without attention would."""
        y = linear_tokens / tokens
        if not 1.0 / _SAMPLE_MAX < y < _SAMPLE_MAX:
            return
        # A prefix that was cached after all makes a prefill look twenty times quicker. The error is
        # relative, so it would weigh as much as four hundred others.
        x = cached + tokens / 2
        expected = 1.0 + self.pair_tokens * x
        y = min(max(y, expected / _OUTLIER), expected * _OUTLIER)
        for name in ("_uu", "_uv", "_vv", "_u", "_v"):
            setattr(self, name, getattr(self, name) * _FADE)
        self._add(y, x, 1.0)
        det = self._uu * self._vv - self._uv * self._uv
        if det <= 1e-9 * self._uu * self._vv:  # all samples lie at one place
            return
        height = (self._u * self._vv - self._v * self._uv) / det
        slope = (self._v * self._uu - self._u * self._uv) / det
        if height > 0.0:
            self.pair_tokens = min(max(slope / height, 0.0), _PAIR_MAX)

    def _add(self, y: float, x: float, weight: float) -> None:
        u, v = 1.0 / y, x / y
        self._uu += weight * u * u
        self._uv += weight * u * v
        self._vv += weight * v * v
        self._u += weight * u
        self._v += weight * v

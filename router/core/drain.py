"""How fast pools compute prompts, as they did lately, and how much they have yet to compute."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

_MEMORY_S = 10.0  # what is older than this counts for little
_LEAST_BUSY_S = 0.5  # of watching, before a rate is believed
_MODELS_MAX = 1_024


@dataclass(slots=True)
class _Pool:
    """One model's. Time passes for it only while it has something to compute."""

    at_s: float
    queued_tokens: int = 0
    computed_tokens: float = 0.0  # lately
    busy_s: float = 0.0  # lately

    def advance(self, now_s: float) -> None:
        passed_s = now_s - self.at_s
        self.at_s = max(now_s, self.at_s)
        if passed_s > 0 and self.queued_tokens:
            kept = exp(-passed_s / _MEMORY_S)
            self.computed_tokens *= kept
            self.busy_s = self.busy_s * kept + _MEMORY_S * (1 - kept)


class Drain:
    """Lifetime: process."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self.queued_tokens = 0  # dispatched, to be computed; of all models

    def sent(self, model: str, tokens: int, now_s: float) -> None:
        """So many tokens are to be computed."""
        pool = self._pools.get(model)
        if pool is None:
            if len(self._pools) >= _MODELS_MAX:
                self._pools = {m: p for m, p in self._pools.items() if p.queued_tokens}
            pool = self._pools[model] = _Pool(now_s)
        pool.advance(now_s)
        pool.queued_tokens += tokens
        self.queued_tokens += tokens

    def over(self, model: str, tokens: int, computed: bool, now_s: float) -> None:
        """They are `computed`, or nobody wants them any more."""
        pool = self._pools[model]
        pool.advance(now_s)
        pool.queued_tokens -= tokens
        self.queued_tokens -= tokens
        if computed:
            pool.computed_tokens += tokens

    def queued_of(self, model: str) -> int:
        """Tokens that a model's pool has yet to compute."""
        pool = self._pools.get(model)
        return 0 if pool is None else pool.queued_tokens

    def rate(self, model: str, now_s: float) -> float | None:
        """Tokens that a model's pool computes in a second when it has to; None: not known."""
        pool = self._pools.get(model)
        if pool is None:
            return None
        pool.advance(now_s)
        if pool.busy_s < _LEAST_BUSY_S or pool.computed_tokens < 1.0:
            return None
        return pool.computed_tokens / pool.busy_s

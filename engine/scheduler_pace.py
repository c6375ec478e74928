"""How many prompt tokens may be computed beside decodes, so that these keep their pace.

Additive-multiplicative control (Chiu and Jain, 1989) on measured step times: where a step took
longer than the target, the budget shrinks in proportion, by half at most; where a step spent all
of it and took less than 90 % of the target, it grows by a sixteenth.
"""

from __future__ import annotations

from engine.scheduler_types import SchedulerSettings


class Pace:
    """Budget of prompt tokens in steps that also decode; lifetime: worker.

    `target_s`: seconds from one token of a request to its next. `least_tokens`: never fewer, so
    that prompts go on even where decodes alone miss the target. `most_tokens`: where it begins.
    """

    def __init__(self, target_s: float, least_tokens: int, most_tokens: int) -> None:
        self.prefill_tokens = most_tokens
        self._target_s = target_s
        self._least_tokens = least_tokens
        self._most_tokens = most_tokens

    @classmethod
    def of(cls, settings: SchedulerSettings) -> Pace | None:
        """What `tpot_target_ms` asks for; None where it asks for nothing."""
        if not settings.tpot_target_ms:
            return None
        return cls(
            settings.tpot_target_ms / 1e3, settings.min_chunk_tokens, settings.max_num_tokens
        )

    def observe(self, prefill_tokens: int, step_s: float) -> None:
        """A step with decodes and so many prompt tokens took `step_s`."""
        if not prefill_tokens:
            return
        tokens = self.prefill_tokens
        if step_s > self._target_s:
            tokens = int(min(tokens, prefill_tokens) * max(0.5, self._target_s / step_s))
        elif prefill_tokens >= tokens and step_s < 0.9 * self._target_s:
            tokens += max(1, tokens // 16)
        self.prefill_tokens = min(self._most_tokens, max(self._least_tokens, tokens))

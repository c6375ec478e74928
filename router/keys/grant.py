"""What one request takes of its key's allowance, from its arrival to its end."""

from __future__ import annotations

from router.keys.allowance import Allowance, Exhausted


class Grant:
    """Lifetime: request; `end` it, however it ends. Times are seconds on the allowance's clock."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._began_s: float | None = None  # while it counts as one in flight
        self._taken_tokens = 0  # for its prompt

    def begin(self, now_s: float) -> Exhausted | None:
        """It comes, of unknown size; None: it may pass."""
        exhausted = self._allowance.begin(now_s)
        if exhausted is None:
            self._began_s = now_s
        return exhausted

    def spend(self, now_s: float, prompt_tokens: int) -> Exhausted | None:
        """Its prompt has so many tokens; None: they were taken."""
        exhausted = self._allowance.spend(now_s, prompt_tokens)
        if exhausted is None:
            self._taken_tokens = prompt_tokens
        return exhausted

    def used(self, now_s: float, prompt_tokens: int, answer_tokens: int) -> None:
        """It was answered, and took so many."""
        self._allowance.settle(now_s, prompt_tokens + answer_tokens - self._taken_tokens)
        self._taken_tokens = prompt_tokens

    def end(self, now_s: float) -> None:
        """It is over. Idempotent."""
        if self._began_s is not None:
            self._allowance.end(now_s - self._began_s)
            self._began_s = None

    def headers(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """What is left, for the client to read."""
        return self._allowance.headers(now_s)

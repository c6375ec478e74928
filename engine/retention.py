"""How much blocks of the KV cache are worth keeping, as a request may say it.

The names, the scale 0..100 and its middle are those of TensorRT-LLM's `KvCacheRetentionConfig`
(1.0): a block has the priority of the range in which its first token lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

MAX_PRIORITY = 100
DEFAULT_PRIORITY = 35
MAX_RANGES = 64
MAX_DURATION_MS = 2_592_000_000  # thirty days


class Worth(NamedTuple):
    """What one block is worth; the larger tuple wins where two requests share it."""

    priority: int  # 0..100; the lowest goes first
    duration_s: float = inf  # of lying idle, then it is worth no more and no less than others


STANDARD = Worth(DEFAULT_PRIORITY)


class InvalidRetention(ValueError):  # noqa: N818 - an answer to a client
    """A retention config that says nothing sensible; the text names the field."""


def _worth(priority: int, duration_ms: float | None, where: str) -> Worth:
    """Raises InvalidRetention."""
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidRetention(f"{where} must be 0..{MAX_PRIORITY}, got {priority}")
    if duration_ms is None:
        return Worth(priority)
    if not 0 <= duration_ms <= MAX_DURATION_MS:
        raise InvalidRetention(
            f"duration_ms beside {where} must be 0..{MAX_DURATION_MS}, got {duration_ms}"
        )
    # A default that ends is a default that stays.
    return STANDARD if priority == DEFAULT_PRIORITY else Worth(priority, duration_ms / 1e3)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Prompt tokens from `start` on, before `end` (None: to its end). Lifetime: request."""

    start: int
    end: int | None
    worth: Worth

    @classmethod
    def of(
        cls, start: int, end: int | None, priority: int, duration_ms: float | None
    ) -> TokenRange:
        """Raises InvalidRetention."""
        if start < 0 or (end is not None and end <= start):
            raise InvalidRetention(
                f"token_start must be 0 or more and below token_end, got {start} and {end}"
            )
        return cls(start, end, _worth(priority, duration_ms, "priority"))


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request says of all its blocks; `decode`: of those that its answer begins.

    Lifetime: request. `ranges` are in order, without overlap.
    """

    ranges: tuple[TokenRange, ...] = ()
    decode: Worth = STANDARD

    @classmethod
    def of(
        cls,
        ranges: list[TokenRange],
        decode_priority: int = DEFAULT_PRIORITY,
        decode_duration_ms: float | None = None,
    ) -> Retention:
        """Raises InvalidRetention for ranges that overlap, too many, or a priority beyond."""
        if len(ranges) > MAX_RANGES:
            raise InvalidRetention(f"{len(ranges)} token ranges; at most {MAX_RANGES}")
        ordered = sorted(ranges, key=lambda one: one.start)
        for one, following in pairwise(ordered):
            if one.end is None or one.end > following.start:
                raise InvalidRetention(
                    f"token ranges overlap: one ends at {one.end or 'the end of the prompt'}, "
                    f"another starts at {following.start}"
                )
        decode = _worth(decode_priority, decode_duration_ms, "decode_retention_priority")
        return cls(tuple(ordered), decode)

    def worths(self, start: int, stop: int, block_size: int, prompt_tokens: int) -> list[Worth]:
        """Of the blocks `start`..`stop` of a request."""
        return [self._of_token(at * block_size, prompt_tokens) for at in range(start, stop)]

    def _of_token(self, token: int, prompt_tokens: int) -> Worth:
        if token >= prompt_tokens:
            return self.decode
        for one in self.ranges:
            if one.start <= token and (one.end is None or token < one.end):
                return one.worth
        return STANDARD

"""What the block pool tells of its visible contents, in the order in which it changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks became visible. `tokens` is int32[len(block_hashes) * block_size]."""

    block_hashes: list[int]
    parent_hash: int | None  # chain hash before the first block; None at the start of a prompt
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks were evicted, in this order (children before parents)."""

    block_hashes: list[int]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing computed so far is visible any more."""


PoolEvent = Stored | Removed | Cleared


class Changes:
    """Events that nobody has taken yet; lifetime: worker.

    More than `most` changed blocks mean that nobody drains: RuntimeError.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._events: list[PoolEvent] = []
        self._pending = 0

    def note(self, event: PoolEvent, changes: int) -> None:
        """`changes`: blocks that it speaks of."""
        self._pending += changes
        if self._pending > self.most:
            raise RuntimeError(
                f"{self._pending} block changes were never drained: call drain_events() "
                "after each step, or make the pool with record_events=False"
            )
        self._events.append(event)

    def drain(self) -> list[PoolEvent]:
        """All since the last call, in order."""
        events, self._events = self._events, []
        self._pending = 0
        return events

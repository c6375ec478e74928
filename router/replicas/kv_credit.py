"""How much of copies may be told, so that they do not crowd out all else in our stream."""

from __future__ import annotations

_BYTES_PER_S = 32 << 20
_BURST_BYTES = 512 << 10


class CopyCredit:
    """One for all copies that this replica tells. Lifetime: process."""

    def __init__(self) -> None:
        self._left_bytes, self._earned_s = 0.0, 0.0

    @property
    def is_spent(self) -> bool:
        """Nothing more may be told for now."""
        return self._left_bytes <= 0

    def earn(self, now_s: float) -> None:
        """For the time that has passed."""
        earned = (now_s - self._earned_s) * _BYTES_PER_S
        self._left_bytes = min(self._left_bytes + earned, _BURST_BYTES)
        self._earned_s = now_s

    def spend(self, size_bytes: int) -> None:
        """So much of a copy is told."""
        self._left_bytes -= size_bytes

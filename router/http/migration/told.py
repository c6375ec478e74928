"""What is counted of streams that go on at another worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Told(Protocol):
    """Who counts what becomes of streams."""

    def watch(self, kept_tokens: Callable[[], int]) -> None:
        """Ask how many token ids are kept whenever that is to be shown."""
        ...

    def stays(self, reason: str) -> None:
        """A stream cannot go on elsewhere, for `reason`."""
        ...

    def moved(self, gap_s: float) -> None:
        """Another worker said its first word, `gap_s` after the last of the one before."""
        ...

    def ended(self, result: str, reason: str) -> None:
        """What came of a stream whose worker failed in the middle of it, by the kind of failure."""
        ...

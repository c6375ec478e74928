"""What the core says of its own requests to whoever listens: to the peers of this router.

Told where a charge is taken, moved on and released, so that what peers know is what the ledger
knows: each dispatch is told once, and so is its end.
"""

from __future__ import annotations

from typing import Protocol

from policies.facts import Finish
from router.core.hold_queue import Pending
from router.core.workers import Worker


class Listener(Protocol):
    """Told in the order of time; must neither raise nor wait."""

    def dispatched(self, pending: Pending, worker: Worker, uncached_tokens: int) -> None:
        """A request was charged to a worker."""
        ...

    def first_token(self, request_id: int) -> None:
        """Its prefill is over."""
        ...

    def progress(self, request_id: int, output_tokens: int) -> None:
        """Its answer has grown to so many tokens."""
        ...

    def ended(self, request_id: int, finish: Finish | None) -> None:
        """It is at its worker no more; with a `finish` where it was answered."""
        ...


class Nobody:
    """There are no peers. Lifetime: process."""

    def dispatched(self, pending: Pending, worker: Worker, uncached_tokens: int) -> None:
        """Nobody listens."""

    def first_token(self, request_id: int) -> None:
        """Nobody listens."""

    def progress(self, request_id: int, output_tokens: int) -> None:
        """Nobody listens."""

    def ended(self, request_id: int, finish: Finish | None) -> None:
        """Nobody listens."""

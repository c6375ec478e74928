"""What a replay cannot do, in words that say what to change."""

from __future__ import annotations


class ReplayError(ValueError):
    """A set-up that cannot be replayed. The text says what, where, and what to do."""

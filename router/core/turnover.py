"""After events were lost: has as much been stored since as the worker holds?"""

from __future__ import annotations


class Turnover:
    """Counts what one worker stored since its cache was known last. Lifetime: worker.

    What was missed is gone by then, but for blocks that hits kept alive all along.
    """

    def __init__(self, capacity_blocks: float) -> None:
        self.over = False
        self._capacity_blocks = capacity_blocks
        self._stored_at_loss = 0

    def begin(self, stored_blocks: int, over: bool = False) -> None:
        """Nothing is known from now on, unless it is `over`; so many blocks were ever stored."""
        self.over = over
        self._stored_at_loss = stored_blocks

    def stored(self, stored_blocks: int) -> None:
        """So many blocks were ever stored."""
        self.over |= stored_blocks - self._stored_at_loss >= self._capacity_blocks

"""Something that may happen with every request: counted, and logged at 1, 2, 4, 8, ... of it."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Trouble:
    """Lifetime: process."""

    def __init__(self, what: str) -> None:
        self.count = 0
        self._what = what

    def met(self, why: str) -> None:
        """Once more."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            log.error("%d %s: %s", self.count, self._what, why)

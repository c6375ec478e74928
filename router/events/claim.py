"""What feeds see of the routers that share events which one alone can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from policies.facts import KvEvents, ReplayEnd


class Claim(Protocol):
    """This router's part in who reads a worker's events."""

    @property
    def reads(self) -> bool:
        """Whether they are to be read here, now."""
        ...

    @property
    def source(self) -> str:
        """Where they come from, for people."""
        ...

    def open(self, on_change: Callable[[], None]) -> None:
        """`on_change` is told whenever `reads` has changed. Raises ValueError where another feed
        has this worker's events.
        """
        ...

    def close(self) -> None:
        """They are not wanted any more."""
        ...

    def tell(self, fact: KvEvents | ReplayEnd) -> None:
        """What was read here, for the core and for all others."""
        ...

    def missing(self) -> bool:
        """Events are missing. Whether whoever reads here is to ask for them."""
        ...

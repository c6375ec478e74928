"""Helpers that the property tests of code without sockets share."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import HealthCheck, settings

from router.upstream.fallback import Deadline, Exchange

# Time limits of single examples say more about the machine than about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """Return `data` in pieces, cut at the given places (any order, repeats allowed)."""
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(places)]


class Wire:
    """Stands in for connection and transport: it takes all written bytes and delivers the given
    pieces.
    """

    closing = False
    can_write = True

    def __init__(self, said: list[bytes], *, beyond_the_end: bool = True) -> None:
        """Create the wire; with `beyond_the_end`, the receiver also gets the pieces after the
        reply's end, and the end of the connection.
        """
        self.transport = self
        self.deadline = Deadline(time.monotonic)
        self.said = said
        self.beyond_the_end = beyond_the_end

    def begin(self, receiver: Exchange) -> None:
        for piece in self.said:
            if self.beyond_the_end or not receiver.ended:
                receiver.feed(piece)
        if self.beyond_the_end or not receiver.ended:
            receiver.lost(None)

    def writelines(self, parts: object) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...

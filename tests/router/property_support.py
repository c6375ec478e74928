"""What the property tests of pure parts share."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import HealthCheck, settings

# Time limits of single examples say more about the machine than about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """`data` in pieces, cut at the given places (any order, repeats allowed)."""
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(places)]

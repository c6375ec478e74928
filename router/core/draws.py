"""Chance as an input: each request's draw is a pure function of the seed and its serial."""

from __future__ import annotations

import xxhash


def draw_of(seed: int, serial: int) -> float:
    """Uniform in [0, 1), the same for the same (seed, serial) on every machine."""
    bits: int = xxhash.xxh3_64_intdigest(serial.to_bytes(8, "little"), seed & (1 << 64) - 1)
    return (bits >> 11) * 2.0**-53

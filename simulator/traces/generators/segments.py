"""Ids of generated prompts, out of the parts they are made of; nothing is stored for them.

A part (a system prompt, a conversation) has a number that nothing else in its workload has. The
block that starts at block `i` of a prompt and ends within part `p` is named `p * 2^22 + i`: equal
names, equal prefix, as a part is always preceded by the same ones.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np

from policies.contract import Hashes
from simulator.traces.size import Size

BLOCK_BITS = 22  # more blocks than the longest prompt has tokens
MAX_PARTS = 1 << 40
USUAL_BLOCK = 16


def span(part: int, first: int, end: int) -> Hashes:
    """Ids of the blocks `first` to `end - 1` of a prompt, which end within `part`."""
    base = part << BLOCK_BITS
    return np.arange(base + first, base + max(first, end), dtype=np.uint64)


def block_for(shared: list[Size]) -> int:
    """Tokens a block: one that ends where each of the `shared` parts does, where that can be.

    16, as engines have it, or the largest power of two below that divides, down to 1: engines'
    blocks are powers of two, and so are a multiple of it.
    """
    if not all(size.fixed for size in shared):
        return USUAL_BLOCK
    return math.gcd(USUAL_BLOCK, *accumulate(size.mean for size in shared))

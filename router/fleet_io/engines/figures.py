"""Numbers in engines' JSON, with the ranges outside of which they are refused."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta

from engine.wire import WireError

Count = Annotated[int, Meta(ge=0, le=10**12)]
Size = Annotated[int, Meta(ge=1, le=1 << 20)]  # tokens of a block
Rank = Annotated[int, Meta(ge=0, le=4_095)]
Ranks = Annotated[int, Meta(ge=1, le=4_096)]
MAX_SHARE = 1.1  # engines overshoot a little


def share(value: float | None, name: str) -> float:
    """A share of the KV cache, 0..1; NaN for None. Raises WireError for what is none."""
    if value is None:
        return math.nan
    if not 0.0 <= value <= MAX_SHARE:
        raise WireError(f"{name} is {value:g}; expected 0..1")
    return min(value, 1.0)

"""The middle of a column."""

from __future__ import annotations

from math import isnan, nan

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def median(values: Floats) -> float:
    """The median, 0 of no values: as numpy's own, but a tenth of its time on a few values."""
    rows = len(values)
    if rows == 0:
        return 0.0
    ordered = values.copy()
    ordered.sort()  # NaN comes last
    if isnan(ordered.item(-1)):
        return nan
    middle: float = ordered.item(rows // 2) + ordered.item((rows - 1) // 2)
    return middle / 2

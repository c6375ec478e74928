"""Types of the arrays that policies use, and fast versions of two numpy functions."""

from __future__ import annotations

from math import isnan, nan

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]  # chain hashes of blocks


def median(values: Floats) -> float:
    """Return the median of `values`, NaN if any value is NaN, or 0.0 if there are no values.

    The result equals that of `np.median`. For a few values it takes a tenth of the time.
    """
    rows = len(values)
    if rows == 0:
        return 0.0
    ordered = values.copy()
    ordered.sort()  # NaN comes last
    if isnan(ordered.item(-1)):
        return nan
    middle: float = ordered.item(rows // 2) + ordered.item((rows - 1) // 2)
    return middle / 2


def between(values: Floats, most: float) -> Floats:
    """Return `values` limited to the range 0..`most`, float64[rows].

    The result equals that of `np.clip`, and takes a fraction of the time.
    """
    limited: Floats = np.minimum(np.maximum(values, 0.0), most)
    return limited

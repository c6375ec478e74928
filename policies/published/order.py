"""Combines several criteria into one cost: a later criterion only decides among equals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from policies.contract import Floats


def places(*keys: npt.NDArray[np.generic]) -> Floats:
    """float64[rows]: 0 for the rows preferred most, 1 for the next; equal rows, equal places.

    `keys`: one array a criterion, the most important first; lower is better, none NaN. A finite
    place for every row, and not +inf for all but the best, leaves the next best to whoever has
    ruled the best one out (a wrapper's threshold, a temperature).
    """
    rows = len(keys[0])
    order = np.lexsort(keys[::-1])
    step = np.zeros(rows, dtype=np.bool_)
    for key in keys:
        ordered = key[order]
        step[1:] |= ordered[1:] != ordered[:-1]
    place = np.empty(rows)
    place[order] = np.cumsum(step)
    return place

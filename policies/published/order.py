"""Combines several criteria into one cost: a later criterion only decides among equals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from policies.contract import Floats


def places(*keys: npt.NDArray[np.generic]) -> Floats:
    """Return each row's place in the order of preference, float64[rows]: 0 for the best, then 1.

    Equal rows have equal places. `keys` has one array per criterion, the most important first;
    lower is better, and none may be NaN. Every row has a finite place. So if the best row is
    excluded later (by a wrapper's threshold or a temperature), the next best one is known.
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

"""Chooses one worker by the costs of a policy, with random choice among equal costs.

Only this module draws among equal costs. If all costs are +inf, it chooses no worker.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import numpy as np

from policies.contract import Floats, Ints

HOLD = -1
TIE = 1e-9  # costs this close, relative to the best or absolute, are equal


def pick(costs: Floats, draw: float, temperature: float = 0.0) -> int:
    """Return the row of the worker to dispatch to, or -1 (`HOLD`) if no worker has a finite cost.

    `costs` are float64[rows]: the lowest cost wins, and +inf excludes a worker. `draw` is a random
    number, uniform in [0, 1). With `temperature` 0, `draw` decides only among workers with the
    lowest cost. Above 0, the row is drawn with probabilities from the softmax of -cost /
    temperature, after the finite costs are scaled to 0..1. So a temperature means the same in any
    unit of costs (as in NVIDIA Dynamo's KV router, 2025).

    Raises ValueError for NaN or -inf (naming the row), for a draw outside [0, 1), and for a
    negative or NaN temperature.
    """
    best = lowest(costs)
    if not 0.0 <= draw < 1.0:
        raise ValueError(f"draw is {draw}; it must be in [0, 1)")
    if not temperature >= 0.0:
        raise ValueError(f"temperature is {temperature}; it must be 0 or more")
    if best == math.inf:
        return HOLD
    if temperature == 0.0:
        ties = (costs <= best + TIE * max(1.0, abs(best))).nonzero()[0]
        row: int = ties.item(int(draw * len(ties)))
        return row
    rows = np.flatnonzero(np.isfinite(costs))
    return int(rows[_softmax_index(costs[rows].tolist(), draw, temperature)])


def ranked(costs: Floats, k: int) -> Ints:
    """Return the rows of the `k` lowest finite costs, lowest first, to explain a decision.

    The result is shorter if there are fewer finite costs. Equal costs are in row order. Raises
    ValueError for NaN or -inf, as `pick` does.
    """
    lowest(costs)
    order = np.argsort(costs, kind="stable")
    finite = order[np.isfinite(costs[order])]
    return finite[: max(k, 0)].astype(np.int64)


def _softmax_index(finite: list[float], draw: float, temperature: float) -> int:
    """Return an index drawn from the softmax of -cost / temperature over finite costs.

    `draw` is the random number in [0, 1) that decides. The softmax is computed in plain Python,
    because numpy's `exp` differs in the last bit between processors.
    """
    low, high = min(finite), max(finite)
    if high - low <= TIE * max(1.0, abs(low)):
        return int(draw * len(finite))
    # Scaled before it is exponentiated: the best row has weight 1 and nothing overflows.
    scale = high - low
    reached = list(accumulate(math.exp(-((cost - low) / scale) / temperature) for cost in finite))
    # Rounding may leave the last sum a hair below the draw's place.
    return min(bisect_right(reached, draw * reached[-1]), len(finite) - 1)


def lowest(costs: Floats) -> float:
    """Return the lowest cost, or +inf if there are no costs.

    Raises ValueError for NaN or -inf, naming the row.
    """
    if len(costs) == 0:
        return math.inf
    best: float = costs.item(costs.argmin())  # a seventh of the time of `min`
    if not best > -math.inf:
        row = int(np.flatnonzero(np.isnan(costs) | (costs == -np.inf))[0])
        raise ValueError(f"cost of row {row} is {costs[row]}; a cost is finite or +inf")
    return best

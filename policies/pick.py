"""From costs to one row: ties, temperature, hold. The only place where a draw breaks a tie."""

from __future__ import annotations

import numpy as np

from policies.contract import Floats, Ints

HOLD = -1
TIE = 1e-9  # costs this close, relative to the best or absolute, are equal


def pick(costs: Floats, draw: float, temperature: float = 0.0) -> int:
    """The row to dispatch to, or -1 (`HOLD`) when every cost is +inf or there is no row.

    `costs`: float64[rows], lower wins, +inf = not this row. `draw`: uniform in [0, 1).
    `temperature` 0 takes the lowest cost and draws among ties; above 0 it draws from the softmax
    of -cost / temperature after the finite costs were scaled to the range 0..1, so that the same
    temperature means the same whatever unit a policy counts in (as NVIDIA Dynamo's KV router
    does, 2025).

    Raises ValueError for NaN or -inf (naming the row), for a draw outside [0, 1) and for a
    negative or NaN temperature.
    """
    _check(costs)
    if not 0.0 <= draw < 1.0:
        raise ValueError(f"draw is {draw}; it must be in [0, 1)")
    if not temperature >= 0.0:
        raise ValueError(f"temperature is {temperature}; it must be 0 or more")
    rows = np.flatnonzero(np.isfinite(costs))
    if len(rows) == 0:
        return HOLD
    finite = costs[rows]
    if temperature == 0.0:
        best = finite.min()
        ties = rows[finite - best <= TIE * max(1.0, abs(best))]
        return int(ties[int(draw * len(ties))])
    return int(rows[_softmax_index(finite, draw, temperature)])


def ranked(costs: Floats, k: int) -> Ints:
    """The at most `k` rows of lowest finite cost, best first; equal costs in row order.

    For explanations. Raises ValueError for NaN or -inf, as `pick` does.
    """
    _check(costs)
    order = np.argsort(costs, kind="stable")
    finite = order[np.isfinite(costs[order])]
    return finite[: max(k, 0)].astype(np.int64)


def _softmax_index(finite: Floats, draw: float, temperature: float) -> int:
    low, high = finite.min(), finite.max()
    if high - low <= TIE * max(1.0, abs(low)):
        return int(draw * len(finite))
    # Scaled before it is exponentiated: the best row has weight 1 and nothing overflows.
    weights = np.exp(-((finite - low) / (high - low)) / temperature)
    reached = np.cumsum(weights)
    # Rounding may leave the last sum a hair below the draw's place.
    return min(int(np.searchsorted(reached, draw * reached[-1], side="right")), len(finite) - 1)


def _check(costs: Floats) -> None:
    bad = np.isnan(costs) | (costs == -np.inf)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"cost of row {row} is {costs[row]}; a cost is finite or +inf")

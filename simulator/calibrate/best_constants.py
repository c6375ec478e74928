"""The constants of a step time that explain measurements best, the same on every processor.

Of a step's time only the soft maximum of `weights_s` and `linear_s * new_tokens` is not linear in
the constants, and it doubles where both of them do. So at a given balance of these two the error
is a convex function of the constants, which has one lowest point, and what remains is a search
along one line, from weights alone to linear work alone (variable projection: Golub and Pereyra,
1973), for each of a few exponents of the soft maximum. The search takes small steps along the whole
line and follows each valley to its bottom. Processors round sums differently. This moves a bottom
by its last digits, while a descent from one start can end in another valley.

Where several constants explain the measurements equally well, a small price decides: the sum of
squares of what each constant contributes, as a share of the measured times, is made least. Of
valleys equally deep the one with the largest `weights_s` against `linear_s` is taken, and of
exponents that explain equally well the largest, whose corner is the sharpest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import exp, hypot, inf, log, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WEIGHTS, LINEAR = "weights_s", "linear_s"
OUTLIER_SHARE = 0.05  # beyond this relative error a measurement counts linearly, not squared
PRICE = 1e-9  # of a constant that explains all of the time; a relative error of 1 costs 1
# Steps along the line, in logarithms: the corner of the soft maximum is some 4 / p wide. Where the
# smaller of linear work and weights adds less than 2e-7 to the larger, the price decides: that is
# where their p-th powers are a million apart.
BALANCE_STEP = 1.5  # divided by p
BALANCE_MARGIN = log(1e6)  # divided by p
EQUALLY_DEEP = 1e-9  # relative difference of two valleys
NO_ERROR = 1e-9  # of relative errors of 4e-5: the price of constants may cost as much
EQUALLY_WELL = 0.01  # relative difference of two exponents: beyond what rounding moves
BOTTOM_WITHIN = 1e-9  # of a balance: the last move before a bottom; those before were far larger
# A step of Newton's that promises to lower the error by less is taken whole and is the last: it
# moves the times by 1e-7 of themselves, and what it leaves is some 1e-12.
LAST_STEP = 1e-14
LEAST_SHARE = 1e-9  # of a step: where so little of it does not help, rounding hides the rest
MAX_STEPS = 200
TINY = 1e-300  # instead of 0, where it would divide


@dataclass(frozen=True, slots=True)
class MeasuredColumns:
    """Measurements as columns, with one row for each measurement, and one for each step in
    `new_tokens`.

    `weights_read` is the share of the weights that each step reads, 1 for a dense model. `linear`
    has the factor of each constant except `weights_s` and `linear_s`.
    """

    seconds: Floats
    first_steps: npt.NDArray[np.intp]  # of each measurement: where its steps begin
    new_tokens: Floats
    weights_read: Floats
    linear: Mapping[str, Floats]


class Exponent(NamedTuple):
    """The exponent p of the soft maximum. It computes x ^ p and x ^ (1 / p) by operations that
    round alike on all processors.
    """

    p: float
    power: Callable[[Floats], Floats]
    root: Callable[[Floats], Floats]


# Kernel tables ask for 0.5 to 2 (docs/notes/step-times.md); a plain roofline is sharp.
EXPONENTS = (
    Exponent(6.0, lambda x: (x * x * x) * (x * x * x), lambda x: np.sqrt(np.cbrt(x))),
    Exponent(3.0, lambda x: x * x * x, np.cbrt),
    Exponent(2.0, lambda x: x * x, np.sqrt),
    Exponent(1.5, lambda x: x * np.sqrt(x), lambda x: np.cbrt(x) * np.cbrt(x)),
    Exponent(1.0, lambda x: x, lambda x: x),
    Exponent(0.75, lambda x: np.sqrt(x) * np.sqrt(np.sqrt(x)), lambda x: x * np.cbrt(x)),
    Exponent(0.5, np.sqrt, lambda x: x * x),
)


class Best(NamedTuple):
    """The seconds of each constant by name, the exponent, and the error that remains."""

    constants: dict[str, float]
    exponent: Exponent
    error: float


@dataclass(frozen=True, slots=True)
class _Valley:
    """The lowest error at one balance, and its slope towards linear work."""

    balance: float
    error: float
    slope: float
    constants: Mapping[str, float]


def best_constants(measured: MeasuredColumns) -> Best:
    """Return the seconds of each constant, none below 0, that have the least error together.

    The error is the mean squared relative error, which grows linearly beyond `OUTLIER_SHARE`
    (pseudo-Huber loss: Charbonnier et al., 1994), plus a price of the constants.
    """
    found = [_best(measured, exponent) for exponent in EXPONENTS]
    least = min(one.error for one in found)
    enough = least * (1.0 + EQUALLY_WELL) + NO_ERROR
    return next(one for one in found if one.error <= enough)


def _best(measured: MeasuredColumns, exponent: Exponent) -> Best:
    """Return the best constants for this exponent of the soft maximum."""
    line = _Balance(measured, exponent)
    tried = [line.lowest(balance) for balance in line.balances()]
    between = pairwise(tried[1:-1])
    bottoms = [line.bottom(low, high) for low, high in between if low.slope < 0.0 <= high.slope]
    valleys = (tried[0], *bottoms, tried[-1])
    least = min(valley.error for valley in valleys)
    chosen = next(valley for valley in valleys if valley.error <= least * (1.0 + EQUALLY_DEEP))
    return Best(dict(chosen.constants), exponent, chosen.error)


def relative_errors(measured: MeasuredColumns, best: Best) -> Floats:
    """Return (model - measured) / measured of each measurement; a constant that is not
    named is 0.
    """
    constants, exponent = best.constants, best.exponent
    left = constants.get(WEIGHTS, 0.0) * measured.weights_read
    right = constants.get(LINEAR, 0.0) * measured.new_tokens
    high = np.maximum(np.maximum(left, right), TINY)
    step_s = high * exponent.root(exponent.power(left / high) + exponent.power(right / high))
    model_s = np.add.reduceat(step_s, measured.first_steps)
    for name, column in measured.linear.items():
        model_s += constants.get(name, 0.0) * column
    errors: Floats = (model_s - measured.seconds) / measured.seconds
    return errors


class _Balance:
    """Finds the least error at each balance between `weights_s` and `linear_s`.

    Constants are counted in units; one unit alone takes the measured times, in the mean square. A
    balance is the logarithm of linear work over weights, both in their units.
    """

    def __init__(self, measured: MeasuredColumns, exponent: Exponent) -> None:
        self._measured, self._exponent = measured, exponent
        self._names = tuple(measured.linear)
        columns = [self._share(column) for column in measured.linear.values()]
        self._units = np.array([1.0 / _mean_square_root(column) for column in columns])
        # One row for the soft maximum, which `lowest` fills, then the others.
        self._shares = np.empty((1 + len(columns), len(measured.seconds)))
        self._shares[1:] = np.array(columns) * self._units[:, None]
        self._weights_unit = 1.0 / _mean_square_root(self._of_steps(measured.weights_read))
        self._linear_unit = 1.0 / max(_mean_square_root(self._of_steps(self._tokens)), TINY)
        self._point = np.full(1 + len(columns), 1.0 / (1 + len(columns)))  # of the last `lowest`

    @property
    def _tokens(self) -> Floats:
        return self._measured.new_tokens

    def balances(self) -> list[float]:
        """Return the balances to try, from weights alone to linear work alone."""
        tokens = self._tokens[self._tokens > 0.0]
        if not len(tokens):
            return [-inf]
        alike = log(self._weights_unit / self._linear_unit)  # of one token: as much of each
        margin, step = BALANCE_MARGIN / self._exponent.p, BALANCE_STEP / self._exponent.p
        low = alike - log(float(tokens.max())) - margin
        high = alike - log(float(tokens.min())) + margin
        steps = max(2, round((high - low) / step))
        return [-inf, *np.linspace(low, high, steps + 1).tolist(), inf]

    def lowest(self, balance: float) -> _Valley:
        """Return the valley of least error at this balance."""
        weights, linear = exp(min(-balance, 0.0)), exp(min(balance, 0.0))
        norm = hypot(weights, linear)
        weights, linear = weights / norm, linear / norm
        corner, turned = self._corner(weights, linear)
        self._shares[0] = corner
        self._point = _least_error(self._shares, self._point)
        wrong = self._point @ self._shares - 1.0
        slope = _mean_product(turned, wrong / _steepness(wrong)) * self._point[0]
        return _Valley(balance, _error(wrong, self._point), slope, self._seconds(weights, linear))

    def bottom(self, low: _Valley, high: _Valley) -> _Valley:
        """Return the balance between these two at which the slope is 0; the slope at the first one
        is negative.

        It is found by regula falsi with the Illinois rule (Dowell and Jarratt, 1971).
        """
        ends = {False: [low.balance, low.slope], True: [high.balance, high.slope]}
        before, found = high, low
        for _ in range(MAX_STEPS):
            if abs(found.balance - before.balance) <= BOTTOM_WITHIN:
                break
            (left, falls), (right, rises) = ends[False], ends[True]
            before, found = found, self.lowest(right - rises * (right - left) / (rises - falls))
            rising = found.slope >= 0.0
            if rising == (before.slope >= 0.0):
                ends[not rising][1] /= 2.0
            ends[rising] = [found.balance, found.slope]
        return found

    def _corner(self, weights: float, linear: float) -> tuple[Floats, Floats]:
        """Return the soft maximum of these two numbers of units for each measurement, and its
        derivative by the balance, as shares of the measured time.
        """
        left = weights * self._weights_unit * self._measured.weights_read
        right = linear * self._linear_unit * self._tokens
        high = np.maximum(np.maximum(left, right), TINY)
        of_weights = self._exponent.power(left / high)
        of_linear = self._exponent.power(right / high)
        power = of_weights + of_linear
        norm = self._exponent.root(power)
        # (weights, linear) are a cosine and a sine, and the balance is the tangent's logarithm.
        turned = (weights * weights * of_linear - linear * linear * of_weights) * (norm / power)
        return self._of_steps(high * norm), self._of_steps(high * turned)

    def _of_steps(self, of_step: Floats) -> Floats:
        """Return values of steps, summed over the steps of each measurement, as a share of its
        time.
        """
        return self._share(np.add.reduceat(of_step, self._measured.first_steps))

    def _share(self, column: Floats) -> Floats:
        share: Floats = column / self._measured.seconds
        return share

    def _seconds(self, weights: float, linear: float) -> dict[str, float]:
        corner, *others = self._point.tolist()
        pairs = zip(self._names, others, self._units.tolist(), strict=True)
        return {
            WEIGHTS: corner * weights * self._weights_unit,
            LINEAR: corner * linear * self._linear_unit,
            **{name: value * unit for name, value, unit in pairs},
        }


def _least_error(shares: Floats, start: Floats) -> Floats:
    """Return the point without negative coordinates at which `point @ shares` is nearest to 1.

    Newton's method: each step goes to the minimum of a quadratic model among these points, and is
    halved until the error falls.
    """
    point = start
    wrong = point @ shares - 1.0
    count = len(wrong)
    for _ in range(MAX_STEPS):
        error = _error(wrong, point)
        steepness = _steepness(wrong)
        slope = shares @ (wrong / steepness) / count + PRICE * point
        weighted: Floats = shares / (steepness * steepness * steepness)
        curvature: Floats = weighted @ shares.T / count + PRICE * np.eye(len(point))
        step = _least_quadratic(curvature, curvature @ point - slope) - point
        last = -float(slope @ step) <= LAST_STEP * (1.0 + error)
        share = 1.0
        change = step @ shares
        while not last and _error(wrong + share * change, point + share * step) >= error:
            share /= 2.0
            last = share < LEAST_SHARE
        point = np.maximum(point + share * step, 0.0)
        wrong = point @ shares - 1.0
        if last:
            break
    return point


def _least_quadratic(curvature: Floats, pull: Floats) -> Floats:
    """Return the point x without negative coordinates at which x * curvature * x / 2 - pull * x is
    least.
    """
    from scipy.optimize import nnls  # of the extra `sim`; other commands do without

    point: Floats = np.asarray(np.linalg.solve(curvature, pull), dtype=np.float64)
    if (point < 0.0).any():
        root = np.asarray(np.linalg.cholesky(curvature), dtype=np.float64)
        point = np.asarray(nnls(root.T, np.linalg.solve(root, pull))[0], dtype=np.float64)
    return point


def _error(wrong: Floats, point: Floats) -> float:
    """Return half of the objective: the loss of the relative errors `wrong`, and the price of
    `point`.
    """
    loss = _mean_product(wrong, wrong / (1.0 + _steepness(wrong)))
    return loss + 0.5 * PRICE * float(point @ point)


def _steepness(wrong: Floats) -> Floats:
    """Return the factor by which the loss of each error is flattened: 1 for small relative errors,
    and more for those beyond `OUTLIER_SHARE`.
    """
    share = wrong / OUTLIER_SHARE
    steepness: Floats = np.sqrt(1.0 + share * share)
    return steepness


def _mean_product(left: Floats, right: Floats) -> float:
    return float(left @ right) / len(left)


def _mean_square_root(column: Floats) -> float:
    return sqrt(_mean_product(column, column))

"""Mean and quantiles of times, from integers only: no float is added, so no order matters.

Sums of numpy's integers are exact, and a quantile between two values is one exact fraction that is
rounded once. The same nanoseconds give the same figures with any numpy and on any processor.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from simulator.replay.result import I64

NS_PER_MS = 1_000_000
DIGITS = 3  # of milliseconds in a report
# The quantiles in the order of `Spread`'s fields, percent.
PERCENTS = (50, 90, 95, 99)


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean and quantiles of a time, ms, three decimals; null where nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


NO_SPREAD = Spread(None, None, None, None, None, None)


def spread(times_ns: I64) -> Spread:
    """Mean and quantiles of `times_ns` (any order), in milliseconds."""
    count = len(times_ns)
    if not count:
        return NO_SPREAD
    ordered = np.sort(times_ns)
    p50, p90, p95, p99 = (_ms(*quantile(ordered, percent)) for percent in PERCENTS)
    mean = _ms(int(ordered.sum(dtype=np.int64)), count)
    return Spread(mean, p50, p90, p95, p99, _ms(int(ordered[-1]), 1))


def quantile(ordered: I64, percent: int) -> tuple[int, int]:
    """The `percent` quantile (0..100) of sorted, non-empty integers as an exact fraction.

    Linear between the two neighbours of position percent / 100 * (n - 1): definition 7 of Hyndman
    and Fan, "Sample Quantiles in Statistical Packages" (1996), numpy's default.
    """
    place, rest = divmod(percent * (len(ordered) - 1), 100)
    low = int(ordered[place])
    high = int(ordered[min(place + 1, len(ordered) - 1)])
    return low * (100 - rest) + high * rest, 100


def total(column: npt.NDArray[np.signedinteger[Any]]) -> int:
    """The exact sum, however wide the column's integers are."""
    return int(column.sum(dtype=np.int64))


def ratio(part: int, whole: int, digits: int) -> float | None:
    """`part / whole` to so many decimals; None where there is no whole."""
    return round(part / whole, digits) if whole > 0 else None


def _ms(part_ns: int, whole: int) -> float:
    return round(part_ns / (whole * NS_PER_MS), DIGITS)

"""What a virtual worker refuses, in the words that its native twin uses too."""

from __future__ import annotations

from math import isfinite
from operator import index

import numpy as np
import numpy.typing as npt

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_BLOCKS = 2**31 - 1
MAX_NS = 2**62  # a hundred and forty years


def in_range(name: str, value: int, least: int, most: int) -> int:
    """`value` as an int within both limits, or ValueError; TypeError if it is no integer."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} must be {least}..{most}, got {number}")
    return number


def check_finite(name: str, value: float) -> float:
    """`value`, or ValueError unless it is finite and above 0."""
    if not (isfinite(value) and value > 0.0):
        raise ValueError(f"{name} must be finite and above 0, got {value}")
    return value


def check_time(now_ns: int, last_ns: int) -> int:
    """`now_ns`, or ValueError if time went back or is out of range."""
    in_range("now_ns", now_ns, 0, MAX_NS)
    if now_ns < last_ns:
        raise ValueError(f"now_ns must not go back: got {now_ns} after {last_ns}")
    return now_ns


def check_chain(chain: npt.NDArray[np.uint64]) -> None:
    """TypeError or ValueError unless `chain` is a contiguous vector of uint64."""
    if not isinstance(chain, np.ndarray) or chain.dtype != np.uint64:
        raise TypeError("chain must be a buffer of uint64")
    if chain.ndim != 1:
        raise ValueError(f"chain must have 1 dimension, got {chain.ndim}")
    if not chain.flags.c_contiguous:
        raise ValueError("chain must be C-contiguous, got a strided view")

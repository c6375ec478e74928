"""What a policy or a wrapper may answer: float64[rows], finite or +inf; all else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.contract import Floats
from policies.parameters import PolicyError
from policies.pick import lowest


class NotACostError(PolicyError):
    """A cost is NaN or -inf; the message names the policy or wrapper and the row."""


class WrapperFailedError(PolicyError):
    """A wrapper's own code raised; the message names it and what it raised."""


def checked(kind: str, name: str, costs: Any, rows: int) -> Floats:
    """`costs`, when they are float64[rows]. For messages: whose, as in "policy", "hybrid".

    Raises PolicyError for another type or shape. That they are numbers, `pick` looks at.
    """
    if not isinstance(costs, np.ndarray) or costs.dtype.char != "d":
        told = costs.dtype if isinstance(costs, np.ndarray) else type(costs).__name__
        raise PolicyError(f"{kind} {name} returned {told}; return a float64 array")
    if costs.shape != (rows,):
        raise PolicyError(
            f"{kind} {name} returned shape {costs.shape} for {rows} workers; "
            f"return one cost for each: ({rows},)"
        )
    return costs


def checked_numbers(kind: str, name: str, costs: Any, rows: int) -> Floats:
    """The same, where somebody goes on with them. Raises NotACostError for NaN or -inf, too."""
    numbers = checked(kind, name, costs, rows)
    try:
        lowest(numbers)
    except ValueError as error:
        raise NotACostError(f"{kind} {name}: {error}") from error
    return numbers

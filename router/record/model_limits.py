"""Parses limits of models in the form in which an operator writes them and a recording of facts
keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from router.core.placement.admission import ModelLimit

_MOST = 1 << 50  # of a limit
_LIMITS = ("max_requests", "max_queued_tokens")
_KEYS = ", ".join(_LIMITS)


def model_limits(lines: Iterable[str]) -> dict[str, ModelLimit]:
    """Return each model's limits, from lines of the form `MODEL:KEY=NUMBER,...`. Raises ValueError
    if a line is malformed.
    """
    found: dict[str, ModelLimit] = {}
    for line in lines:
        model, colon, rest = line.rpartition(":")
        if not (model and colon and rest):
            raise ValueError(f"{line[:200]!r} is not MODEL:KEY=NUMBER,...; keys: {_KEYS}")
        given = {}
        for pair in rest.split(","):
            key, _, number = pair.strip().partition("=")
            if key not in _LIMITS or key in given:
                raise ValueError(f"{line[:200]!r}: {pair[:64]!r}; keys, each once: {_KEYS}")
            whole = number.isascii() and number.isdigit() and len(number) <= 16
            if not (whole and 1 <= int(number) <= _MOST):
                raise ValueError(f"{line[:200]!r}: {key} must be 1..{_MOST}, is {number[:20]!r}")
            given[key] = float(number)
        if model in found:
            raise ValueError(f"the model {model[:200]!r} is given twice")
        found[model] = replace(ModelLimit(), **given)
    return found

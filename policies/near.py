"""The known name that is nearest to an unknown one: `did you mean ...?` in every error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(given: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `given`, or None. `cutoff`: how alike they must be, 0..1."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)` to stand behind an unknown name; empty if no known name is near."""
    near = nearest(given, known)
    return "" if near is None else f" (did you mean {near}?)"

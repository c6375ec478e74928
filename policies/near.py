"""The known name that is nearest to an unknown one: `did you mean ...?` in every error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(given: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `given`, or None. `cutoff`: how alike they must be, 0..1."""
    plain, by_plain = _plain(given), {_plain(name): name for name in known}
    near = difflib.get_close_matches(plain, by_plain, n=len(by_plain) or 1, cutoff=cutoff)
    if not near:
        return None
    like = difflib.SequenceMatcher(b=plain)
    return by_plain[max(near, key=lambda name: _likeness(like, name))]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _likeness(like: difflib.SequenceMatcher[str], name: str) -> tuple[float, int]:
    """How alike the two are; the longest piece in common settles a tie (`abs` against `rel`)."""
    like.set_seq1(name)
    return like.ratio(), like.find_longest_match().size


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)` to stand behind an unknown name; empty if no known name is near."""
    near = nearest(given, known)
    return "" if near is None else f" (did you mean {near}?)"

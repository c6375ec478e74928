"""Finds the known name that is most similar to an unknown one, for `did you mean ...?` in
errors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(given: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `given`, or None.

    `cutoff` is the least similarity, 0..1.
    """
    plain, by_plain = _plain(given), {_plain(name): name for name in known}
    near = difflib.get_close_matches(plain, by_plain, n=len(by_plain) or 1, cutoff=cutoff)
    if not near:
        return None
    like = difflib.SequenceMatcher(b=plain)
    return by_plain[max(near, key=lambda name: _likeness(like, name))]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _likeness(like: difflib.SequenceMatcher[str], name: str) -> tuple[float, int]:
    """Return two sort keys for the similarity of a name to the one that `like` has: the share of
    equal characters, and the length of the longest common piece. The second one breaks a tie (`abs`
    against `rel`).
    """
    like.set_seq1(name)
    return like.ratio(), like.find_longest_match().size


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` for an error message, or "" if no known name is similar."""
    near = nearest(given, known)
    return "" if near is None else f" (did you mean {near}?)"

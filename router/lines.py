"""How often to tell people of what happens again and again."""

from __future__ import annotations


def worth_a_line(occurrences: int) -> bool:
    """At 1, 2, 4, 8, ...: it must not fill the log."""
    return occurrences & (occurrences - 1) == 0

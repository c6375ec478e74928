"""The smallest number that will do, by asking about few of them.

More is better in expectation only: near the border a lucky smaller number may do and a larger one
may not. So the border is bracketed and halved as if it were sharp, then its neighbours are asked.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Found:
    """Where the border is. Lifetime: one search."""

    at: int | None = None  # None: not even the highest will do
    asked: dict[int, bool] = field(default_factory=dict)
    lucky: list[tuple[int, int]] = field(default_factory=list)  # will do; a higher that will not


def search(start: int, low: int, high: int) -> Generator[int, bool, Found]:
    """Yields numbers of [low, high] to be told whether each will do; returns what it found.

    The answer and its upper neighbour do, its lower neighbour does not; each is asked once. Takes
    about 2 log2 of the distance from `start` to the answer, and three more.
    """
    found = Found()
    floor, at = low, min(max(start, low), high)
    while True:
        border = yield from _border(at, floor, high, found)
        if border is None:
            return found
        after = border + 1
        if after > high or (yield from _ask(after, found)):
            break
        found.lucky.append((border, after))
        floor = at = after + 1
        if floor > high:
            return found
    found.at = border
    below = border - 2
    lucky = below >= low and (yield from _ask(below, found))
    if lucky and (below, border - 1) not in found.lucky:
        found.lucky.append((below, border - 1))
    return found


def _border(at: int, low: int, high: int, found: Found) -> Generator[int, bool, int | None]:
    """A number that will do above one that will not, or `low`; None where `high` will not do."""
    step = 1
    if (yield from _ask(at, found)):
        good, bad = at, low - 1
        while good > low:
            lower = max(low, good - step)
            if not (yield from _ask(lower, found)):
                bad = lower
                break
            good, step = lower, step * 2
    else:
        good, bad = high + 1, at
        while bad < high:
            higher = min(high, bad + step)
            if (yield from _ask(higher, found)):
                good = higher
                break
            bad, step = higher, step * 2
        if good > high:
            return None
    while good - bad > 1:
        middle = (good + bad) // 2
        if (yield from _ask(middle, found)):
            good = middle
        else:
            bad = middle
    return good


def _ask(number: int, found: Found) -> Generator[int, bool, bool]:
    if number not in found.asked:
        found.asked[number] = yield number
    return found.asked[number]

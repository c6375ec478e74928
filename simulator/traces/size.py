"""A number of tokens or turns: the same every time, or drawn."""

from __future__ import annotations

import re
from random import Random

MAX_SIZE = 4 << 20
SHAPE = re.compile(r"(\d+)(?:(~|\.\.)(\d+))?")


class Size:
    """`1200` always; `1200~360` normal with this mean and deviation, rounded; `2..20` uniform.

    Draws are at least 1, or 0 where `mean` is 0: what may be absent. Immutable. Lifetime: process.
    """

    __slots__ = ("kind", "mean", "other")

    def __init__(self, mean: int, kind: str = "", other: int = 0) -> None:
        self.mean = mean  # or the lower end
        self.kind = kind  # "", "~" or ".."
        self.other = other  # the deviation, or the upper end

    @classmethod
    def parse(cls, text: str) -> Size:
        """Reads one of the three forms. Raises ValueError for anything else."""
        match = SHAPE.fullmatch(text)
        if match is None or max(map(int, filter(None, match.group(1, 3)))) > MAX_SIZE:
            raise ValueError(
                f"expected 1200, mean~deviation as 1200~360 or low..high as 2..20, to {MAX_SIZE}"
            )
        size = cls(int(match[1]), match[2] or "", int(match[3] or 0))
        if size.kind == ".." and size.other < size.mean:
            raise ValueError("expected low..high with low not above high")
        return size

    def __str__(self) -> str:
        return f"{self.mean}{self.kind}{self.other}" if self.kind else str(self.mean)

    @property
    def fixed(self) -> bool:
        """Whether every draw is the same."""
        return not self.kind

    @property
    def most(self) -> int:
        """No draw is above it, but for one in a thousand million of a normal one."""
        return self.other if self.kind == ".." else self.mean + 6 * self.other

    def draw(self, random: Random) -> int:
        """One of them; what is fixed draws no chance."""
        if not self.kind:
            return self.mean
        if self.kind == "..":
            return random.randint(self.mean, self.other)
        drawn = round(random.gauss(self.mean, self.other))
        return min(MAX_SIZE, max(1 if self.mean else 0, drawn))

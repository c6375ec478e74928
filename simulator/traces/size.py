"""A number of tokens or turns: the same every time, or drawn."""

from __future__ import annotations

import math
import re
from random import Random

MAX_SIZE = 4 << 20
MAX_SIGMA = 3.0  # of a log-normal one: above it one draw in a thousand is 10,000 times the median
SHAPE = re.compile(r"(\d+)(?:(~|\.\.)(\d+)|(\*)(\d(?:\.\d+)?))?")


class Size:
    """`1200` always; `1200~360` normal with this mean and deviation, rounded; `2..20` uniform;
    `700*0.6` log-normal with this median and sigma, rounded.

    Draws are at least 1, or 0 where `mean` is 0: what may be absent. Immutable. Lifetime: process.
    """

    __slots__ = ("kind", "mean", "other")

    def __init__(self, mean: int, kind: str = "", other: float = 0) -> None:
        self.mean = mean  # or the lower end, or the median
        self.kind = kind  # "", "~", ".." or "*"
        self.other = other  # the deviation, the upper end, or sigma

    @classmethod
    def parse(cls, text: str) -> Size:
        """Reads one of the four forms. Raises ValueError for anything else."""
        match = SHAPE.fullmatch(text)
        if match is None or max(map(int, filter(None, match.group(1, 3)))) > MAX_SIZE:
            raise ValueError(
                "expected 1200, mean~deviation as 1200~360, low..high as 2..20 or median*sigma as "
                f"700*0.6, to {MAX_SIZE}"
            )
        if match[4]:
            if float(match[5]) > MAX_SIGMA:
                raise ValueError(f"expected median*sigma with sigma at most {MAX_SIGMA:g}")
            return cls(int(match[1]), "*", float(match[5]))
        size = cls(int(match[1]), match[2] or "", int(match[3] or 0))
        if size.kind == ".." and size.other < size.mean:
            raise ValueError("expected low..high with low not above high")
        return size

    def __str__(self) -> str:
        return f"{self.mean}{self.kind}{self.other:g}" if self.kind else str(self.mean)

    @property
    def fixed(self) -> bool:
        """Whether every draw is the same."""
        return not self.kind

    @property
    def most(self) -> int:
        """No draw is above it, but for one in a thousand million of a normal or log-normal one."""
        if self.kind == "*":
            return min(MAX_SIZE, math.ceil(self.mean * math.exp(6 * self.other)))
        return int(self.other if self.kind == ".." else self.mean + 6 * self.other)

    def draw(self, random: Random) -> int:
        """One of them; what is fixed draws no chance."""
        if not self.kind:
            return self.mean
        if self.kind == "..":
            return random.randint(self.mean, int(self.other))
        if self.kind == "*":
            drawn = round(self.mean * math.exp(random.gauss(0.0, self.other)))
        else:
            drawn = round(random.gauss(self.mean, self.other))
        return min(MAX_SIZE, max(1 if self.mean else 0, drawn))

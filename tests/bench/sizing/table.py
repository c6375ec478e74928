"""A section of the sizing page: a heading, a text and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """One table with the text that a reader needs to understand it."""

    name: str  # as `--only` asks for it
    title: str
    text: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [f"### {self.title}", "", self.text, "", _line(self.head)]
        lines += ["|" + "---|" * len(self.head), *map(_line, self.rows)]
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def two_digits(value: float) -> str:
    """Return the value with two significant digits, as people read sizes: 0.034, 1.3,
    140, 12,000.
    """
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"

"""Tables of policies for a terminal: one line each, columns that fit, the others below."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

GAP = 1  # the divider between two cells

Column = tuple[str, list[Text]]  # title, a cell for each line


def policy_tables(
    names: Sequence[str], columns: Sequence[Column], width: int
) -> list[RenderableType]:
    """Lines of `names` in as many tables as `width` columns need, an empty line after each."""
    room = width - max((len(name) for name in names), default=0) - GAP
    tables = [_table(names, part) for part in _parts(columns, room)]
    return [part for table in tables for part in (table, Text())]


def _parts(columns: Sequence[Column], room: int) -> list[list[Column]]:
    """The columns, cut where the next one would not fit; one at least in each part."""
    parts: list[list[Column]] = []
    left = -1
    for title, cells in columns:
        needed = max([len(title), *(len(text) for text in cells)]) + GAP
        if needed > left or not parts:
            parts.append([])
            left = room
        parts[-1].append((title, cells))
        left -= needed
    return parts


def _table(names: Sequence[str], columns: Sequence[Column]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("policy", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for number, name in enumerate(names):
        table.add_row(name, *(cells[number] for _, cells in columns))
    return table

"""A table of states that notes which of its rows are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn


class StateRecorder(dict[tuple[str, str], str]):
    """A copy of a table to be put in its place. Lifetime: test.

    `missed` has each (state, event) that was looked up and is no row of the table.
    """

    def __init__(self, table: Mapping[tuple[str, str], str]) -> None:
        super().__init__(table)
        self.unused = set(table)
        self.missed: set[tuple[str, str]] = set()

    def __getitem__(self, row: tuple[str, str]) -> str:
        self.unused.discard(row)
        return super().__getitem__(row)

    def __missing__(self, row: tuple[str, str]) -> NoReturn:
        self.missed.add(row)
        raise KeyError(row)

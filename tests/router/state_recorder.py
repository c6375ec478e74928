"""A state table for tests that records which of its rows are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn


class StateRecorder(dict[tuple[str, str], str]):
    """A copy of a state table that a test puts in the table's place. `missed` has each (state,
    event) that was looked up without being a row of the table. Lifetime: test.
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

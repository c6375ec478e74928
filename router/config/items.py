"""Checks of lists: every item is checked, and every bad one is reported with its number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")


class BadItemsError(ValueError):
    """Raised for list items that cannot be used; `problems` has the problem of each bad item by the
    item's number.
    """

    def __init__(self, problems: dict[int, str]) -> None:
        super().__init__("; ".join(f"[{number}]: {text}" for number, text in problems.items()))
        self.problems = problems


def each(items: Iterable[Any], check: Callable[[Any], Item]) -> tuple[Item, ...]:
    """Return the results of `check` for all items. Raises BadItemsError with all items for which
    `check` failed.
    """
    checked: list[Item] = []
    problems: dict[int, str] = {}
    for number, item in enumerate(items):
        try:
            checked.append(check(item))
        except ValueError as error:
            problems[number] = str(error)
    if problems:
        raise BadItemsError(problems)
    return tuple(checked)

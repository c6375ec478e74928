"""What is wrong with a sweep or a plan, one line for each thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class SweepError(ValueError):
    """A sweep or plan that cannot be run. `problems` has a line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def unknown(where: str, name: object, valid: Iterable[str]) -> str:
    """The line for a name that is not among the `valid` ones, with the likeliest meant."""
    names = list(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{where}: unknown {name!r}{hint}; valid: {', '.join(names)}"

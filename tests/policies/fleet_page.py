"""Makes the page docs/reference/fleet.md, which says what a policy sees.

    python -m tests.policies.fleet_page docs/reference/fleet.md

The page is made from the comments and docstrings of `policies/contract.py`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from policies.contract import FleetView, RequestView, TableFleet

INTRODUCTION = """\
# What a policy sees

*`python -m tests.policies.fleet_page docs/reference/fleet.md` makes this page from
`policies/contract.py`.*

`costs(request, fleet, state)` gets a `RequestView` and a `FleetView`, which are read-only and valid
during one call only. [Policies](../policies.md#writing-one) says how to write a policy.

- **Age** says how old a value may be. *Current*: as of this decision. `load_age_s`, `event_age_s`:
  as old as the worker's last load report or KV event, which are columns themselves.
- A float that is unknown is NaN.
- *Other clients* are clients that send requests to a worker past this router.
- Only a policy with the class attribute `needs_sessions = True` sees sessions. For another policy
  `standing` is "new", `home_id` -1, and these are 0 or False: `trunk_tokens`, `return_chance`,
  `working_set_tokens`, `working_set_s`, `holds_trunk`, `cycle_s`, `hot_trunk_tokens`,
  `copies_missing`. The router needs some 20 us a request to track sessions.
"""
COLUMNS = {"Ints": "int64", "Floats": "float64", "Bools": "bool"}
TYPES = {**COLUMNS, "Hashes": "uint64[blocks]", "Standing": "str"}
PARTS = re.compile(r"(.*?)\s*Unit: (.*?)\. Source: (.*)\. Age: (.*)\.", re.DOTALL)
FIELD = re.compile(r"(\w+): (.+?)(?: = .+)?")


class ContractError(Exception):
    """Raised if a column or field of the contract does not state its unit, its source or
    its age.
    """


class Row(NamedTuple):
    """One column or field of the contract, with the parts of its comment."""

    name: str
    kind: str
    meaning: str
    unit: str
    source: str
    age: str


def page() -> str:
    """Return the whole of docs/reference/fleet.md."""
    columns = list(fleet_rows())
    return "\n".join(
        [
            INTRODUCTION,
            "## `fleet`: a value for each worker",
            "",
            "A column is a numpy array with one row for each worker that may take the request.",
            "",
            *table("column", [row for row in columns if is_column(row)]),
            "## `fleet`: one value",
            "",
            *table("name", [row for row in columns if not is_column(row)]),
            "## `fleet`: computed from the columns",
            "",
            "| name | what it is |",
            "|---|---|",
            *computed(),
            "",
            "## `request`",
            "",
            *table("field", list(request_rows())),
        ]
    )


def table(first: str, rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a table of `rows`, and an empty line."""
    yield f"| {first} | type | unit | what it is | source | age |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        unit = "" if row.unit == "none" else row.unit
        yield f"| `{row.name}` | {row.kind} | {unit} | {row.meaning} | {row.source} | {row.age} |"
    yield ""


def is_column(row: Row) -> bool:
    """Return whether the row describes a column, which has a value for each worker."""
    return row.kind in COLUMNS.values()


def fleet_rows() -> Iterator[Row]:
    """Yield a row of the page for each column of a fleet, in the contract's order."""
    for column in fields(TableFleet):
        kind = annotation(getattr(FleetView, column.name).fget)
        yield row_of(column.name, kind, inspect.getdoc(getattr(FleetView, column.name)) or "")


def request_rows() -> Iterator[Row]:
    """Yield a row of the page for each field of a request, in the contract's order."""
    known = {field.name for field in fields(RequestView)}
    comment: list[str] = []
    for line in map(str.strip, inspect.getsource(RequestView).splitlines()):
        if line.startswith("#"):
            comment.append(line.removeprefix("# "))
            continue
        found = FIELD.fullmatch(line)
        if found is not None and found[1] in known:
            yield row_of(found[1], found[2], " ".join(comment))
        comment = []


def row_of(name: str, kind: str, text: str) -> Row:
    """Return the row of one name, read from its comment. Raises `ContractError` if the comment
    lacks a part.
    """
    parts = PARTS.fullmatch(" ".join(text.split()))
    if parts is None:
        raise ContractError(f"{name}: end the comment with `Unit: ... Source: ... Age: ...`")
    shown = TYPES.get(kind, kind.replace("|", r"\|"))
    return Row(name, shown, parts[1], parts[2], parts[3], parts[4])


def computed() -> Iterator[str]:
    """Yield the lines on what a fleet computes from its columns, each with the first sentence of
    its docstring.
    """
    columns = {column.name for column in fields(TableFleet)}
    for name, member in vars(FleetView).items():
        if name in columns or name.startswith("_") or name == "with_columns":
            continue
        if isinstance(member, property):
            call = name
        else:
            names = list(inspect.signature(member).parameters)[1:]
            call = f"{name}({', '.join(names)})"
        first = (inspect.getdoc(member) or "").partition("\n\n")[0].removeprefix("Return ")
        yield f"| `{call}` | {first[:1].upper()}{first[1:]} |"


def annotation(getter: Any) -> str:
    """Return the return type of a property as the source writes it."""
    return str(getter.__annotations__["return"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")

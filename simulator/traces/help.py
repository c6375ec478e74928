"""What sources there are and what they can be asked, for `--help` and for docs/reference/traces.md.

python -m simulator.traces.help docs/reference/traces.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from simulator.traces.formats import FORMATS
from simulator.traces.generators.table import GENERATORS
from simulator.traces.options import option_rows

INTRODUCTION = """\
# Where requests come from

A source is a file or `gen:NAME?key=value&key=value`. Files may be plain, gzip or zstd and are
read as a stream; what they are shows in their first lines, or is said with `--format
NAME?key=value`.

A wrong line is left out, counted, and told with file, line, field and what is expected (the first
ten). More than one wrong line in a hundred of the first thousand or more ends the reading; strict
reading ends at the first. Times never go back; a request log's lines may be an hour late, those
of CSV logs a second, and are put in order. The first arrival is time 0, but for Mooncake's files,
whose times count from their own start.

What is asked of a source is done in this order: requests of one instant spread over a while, the
first seconds, the first requests (all in recorded time), then the speed. A rate instead of a
speed is reached by one factor on all times and needs a first pass over the chosen part. Clients'
pauses shrink with the times.

An engine's block size must divide the number of tokens that an id stands for, or be a multiple of
it. For smaller blocks, names are derived from the id; where a file lists full blocks only, what
follows the last one is taken to be shared with nobody.
"""
SIZES = """\
A size is `1200` (always), `1200~360` (normal: mean and deviation, at least 1), `2..20` (uniform)
or `700*0.6` (log-normal: median and sigma). Same seed, same requests. `inf` is a rate at which all
arrive at once.
"""


def help_lines() -> Iterator[str]:
    """Formats and generators with their keys, as plain text of at most 100 columns."""
    yield "formats (auto-detected; --format NAME?key=value):"
    for form in FORMATS:
        yield f"  {form.name:<15} {form.about}"
        yield from (f"    {line}" for line in _keys(form.options))
    yield "generators (gen:NAME?key=value&key=value):"
    for one in GENERATORS:
        yield f"  {one.name:<15} {one.about}"
        yield from (f"    {line}" for line in _keys(one.keys))


def _keys(kind: type) -> Iterator[str]:
    for key, default, meaning in option_rows(kind):
        yield f"{key:<13} {meaning}" + (f" [{default}]" if 0 < len(default) < 20 else "")


def markdown() -> str:
    """The whole of docs/reference/traces.md."""
    lines = [INTRODUCTION, "## Formats", "", "| name | what | tokens an id | key | default | |"]
    lines.append("|---|---|---:|---|---|---|")
    for form in FORMATS:
        rows = list(option_rows(form.options)) or [("", "", "")]
        for index, row in enumerate(rows):
            head = (f"`{form.name}`", form.about, str(form.block_tokens))
            lines.append(_row(*(head if not index else ("", "", "")), *_marked(row)))
    lines += ["", "## Generators", "", SIZES]
    for one in GENERATORS:
        lines += [f"### `gen:{one.name}`", "", *wrap(_about(one.keys), 100), ""]
        lines += ["| key | default | |", "|---|---|---|"]
        lines += [_row(*_marked(row)) for row in option_rows(one.keys)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _about(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _marked(row: tuple[str, str, str]) -> tuple[str, str, str]:
    key, default, meaning = row
    return (f"`{key}`" if key else "", f"`{default}`" if default else "", meaning)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown())

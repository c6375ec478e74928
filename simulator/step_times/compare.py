"""Compares profiles with tables of measured kernels: relative errors by kind of step.

A table is either queried (`tables.Tables`) or read from a CSV file with the columns `COLUMNS`,
which `write_rows` writes and anybody with a GPU can make.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.profiles import Profile
from simulator.step_times.kernel_fit import errors
from simulator.step_times.tables import KINDS, Kind, TableError, TableRow

TOLERANCE = 0.10  # of a row
COLUMNS = (
    "profile", "prefill_tokens", "cached_tokens", "decodes", "context_tokens", "seconds",
)  # fmt: skip
MAX_ROWS = 1_000_000
MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class KindDifference:
    """The errors |model / table - 1| of the rows of one kind of step, and their mean with
    its sign.
    """

    kind: Kind
    rows: int
    mean: float
    median: float
    p90: float
    worst: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A profile compared with a table of measured kernels. `errors` are model / table - 1, in the
    order of `rows`.
    """

    name: str
    source: str
    rows: tuple[TableRow, ...]
    errors: tuple[float, ...]
    chunk_s: float  # to prefill 8192 tokens, kernels alone

    @property
    def kinds(self) -> tuple[KindDifference, ...]:
        """Return the errors by kind of step; kinds of which the table has no row are left out."""
        found = []
        for kind in KINDS:
            off = np.array(
                [e for row, e in zip(self.rows, self.errors, strict=True) if row.kind == kind]
            )
            if len(off):
                median, p90, worst = np.percentile(np.abs(off), [50, 90, 100]).tolist()
                found.append(KindDifference(kind, len(off), float(off.mean()), median, p90, worst))
        return tuple(found)

    @property
    def outside(self) -> tuple[tuple[TableRow, float], ...]:
        """Return the rows beyond `TOLERANCE` with their errors, largest first, without mixed steps.

        Tables have no mixed steps: a rule adds them up from prefill and decode.
        """
        rows = zip(self.rows, self.errors, strict=True)
        beyond = [pair for pair in rows if pair[0].kind != "mixed" and abs(pair[1]) > TOLERANCE]
        return tuple(sorted(beyond, key=lambda pair: -abs(pair[1])))


def compare(profile: Profile, source: str, rows: Sequence[TableRow]) -> Comparison:
    """Return a comparison of the kernels' part of `profile` with the rows of a table."""
    off = errors(profile.step_time, rows)
    chunk_s = profile.step_time.kernels.prefill_s(8192)
    return Comparison(profile.name, source, tuple(rows), tuple(off.tolist()), chunk_s)


def write_rows(tables: Mapping[str, Iterable[TableRow]], path: Path) -> None:
    """Write the rows of each profile's table as CSV. Raises OSError if that fails."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, rows in tables.items():
            for row in rows:
                writer.writerow((name, *row[:4], f"{row.seconds:.6g}"))


def read_rows(path: Path) -> dict[str, list[TableRow]]:
    """Return the rows of each profile in a CSV file with `COLUMNS`, in any order; other columns are
    ignored.

    Raises TableError for a file that cannot be read and for the first wrong line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return _read(file, path)
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise TableError(f"{path}: not a CSV file: {error}") from error


def _read(file: Iterable[str], path: Path) -> dict[str, list[TableRow]]:
    reader = csv.DictReader(file)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise TableError(
            f"{path}, line 1: no column {', '.join(missing)}; a table has {','.join(COLUMNS)}"
        )
    found: defaultdict[str, list[TableRow]] = defaultdict(list)
    for number, line in enumerate(reader):
        where = f"{path}, line {reader.line_num}"
        if number >= MAX_ROWS:
            raise TableError(f"{where}: more than {MAX_ROWS} rows")
        tokens = [_count(line, name, where) for name in COLUMNS[1:5]]
        seconds = _seconds(line["seconds"], where)
        if not tokens[0] + tokens[2]:
            raise TableError(f"{where}: a step of no tokens")
        found[line["profile"]].append(TableRow(tokens[0], tokens[1], tokens[2], tokens[3], seconds))
    return dict(found)


def _count(line: Mapping[str, str | None], name: str, where: str) -> int:
    text = line[name] or ""
    if not (text.isascii() and text.isdigit() and int(text[:20]) <= MAX_TOKENS):
        raise TableError(f"{where}: {name}: {text[:40]!r} is not a whole number in 0..{MAX_TOKENS}")
    return int(text)


def _seconds(text: str | None, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise TableError(f"{where}: seconds: {(text or '')[:40]!r} is not a number above 0")
    return value


Floats = npt.NDArray[np.float64]


def points(comparisons: Sequence[Comparison]) -> dict[str, tuple[Floats, Floats]]:
    """Return, for a plot, the table's seconds and model / table - 1 of all rows of each kind."""
    found: dict[str, tuple[Floats, Floats]] = {}
    for kind in KINDS:
        pairs = [
            (row.seconds, off)
            for one in comparisons
            for row, off in zip(one.rows, one.errors, strict=True)
            if row.kind == kind
        ]
        if pairs:
            seconds, off = np.array(pairs).T
            found[kind] = (seconds, off)
    return found

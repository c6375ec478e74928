"""The rows of kernel tables in `tests/data/kernel_tables`, for tests."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from simulator.step_times.compare import read_rows
from simulator.step_times.tables import TableRow

PACKED = Path(__file__).parents[2] / "data" / "kernel_tables" / "rows.csv.gz"


@cache
def rows_by_profile() -> dict[str, list[TableRow]]:
    with TemporaryDirectory() as folder:
        path = unpacked(Path(folder))
        return read_rows(path)


def unpacked(folder: Path) -> Path:
    """Unpack the rows to a CSV file in `folder`; return its path."""
    path = folder / "rows.csv"
    path.write_bytes(gzip.decompress(PACKED.read_bytes()))
    return path

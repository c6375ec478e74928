"""Measures native tables and their plain-Python versions: CPU time of a call, as a table
or JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
TWIN_RUNS = 20  # a twin is slow, and a few runs are enough for its figure


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of the native code and `twin`, the plain-Python figure in the
    same unit.
    """

    what: str
    value: float
    unit: str
    twin: float | None = None


def median_us(work: Callable[[int, Hashes], object], chains: list[Hashes]) -> float:
    """Return the median CPU microseconds of `work`, which is called once for each chain with the
    chain and its number.
    """
    took = []
    for number, chain in enumerate(chains):
        start_ns = time.thread_time_ns()
        work(number, chain)
        took.append(time.thread_time_ns() - start_ns)
    return statistics.median(took) / 1e3


def main(
    about: str,
    native: Callable[[int], dict[str, float]],
    twin: Callable[[int], dict[str, float]],
    memory: Callable[[], Row],
) -> None:
    """Print the figures of native code and twin as a table, or as JSON. `native` and `twin` return
    microseconds by name for a number of runs.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    figures, others = native(options.runs), twin(min(options.runs, TWIN_RUNS))
    rows = [Row(what, value, "us", others[what]) for what, value in figures.items()] + [memory()]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        against = f"{row.twin / row.value:8.0f} x twin" if row.twin else ""
        print(f"{row.what:56} {row.value:9.1f} {row.unit:3} {against}")

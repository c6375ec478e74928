"""Helpers that all benches use: pinning to one core, medians, rows with bounds and ratios, and
Dynamo's figures.

Every bench measures our code and what it is compared with in one run on one machine, so that ratios
hold on machines of another speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PEER = Path(__file__).with_name("peer_dynamo.py")
PEER_S_MAX = 300.0


@dataclass(frozen=True)
class Row:
    """One measured figure of ours; `others` has the same figure by the name of what it is compared
    with.
    """

    what: str
    value: float
    unit: str  # "us", "B/block", "s": less is better; "M/s": more is
    bar: float | None = None  # the bound, in `unit`
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def more_is_better(self) -> bool:
        """Whether a greater figure is better, as for a rate."""
        return self.unit.endswith("/s")

    def times_better(self, than: float) -> float:
        """Return how many times better the figure is than another one; below 1 means worse."""
        return self.value / than if self.more_is_better else than / self.value

    @property
    def reached(self) -> bool | None:
        """Whether the figure reaches its bound, or None if it has no bound."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.more_is_better else self.value <= self.bar

    def __str__(self) -> str:
        verdict = {True: "reached", False: "MISSED", None: ""}[self.reached]
        bar = f"{self.bar:g} {verdict}" if self.bar is not None else ""
        ratios = [
            f"{self.times_better(value):.2f} x {name} ({value:,.2f})"
            for name, value in self.others.items()
        ]
        return f"{self.what:58} {self.value:10,.2f} {self.unit:8} {bar:14} {', '.join(ratios)}"


def median_us(work: Callable[[], object], runs: int, repeat: int = 1) -> float:
    """Return the median microseconds of one call, over `runs` runs of `repeat` calls each."""
    taken = []
    for _ in range(runs):
        start_s = time.perf_counter()
        for _ in range(repeat):
            work()
        taken.append((time.perf_counter() - start_s) / repeat)
    return statistics.median(taken) * 1e6


def arguments(description: str, runs: int) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benches have."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--runs", type=int, default=runs, help="runs a median is taken over")
    parser.add_argument("--core", type=int, help="core to stay on (default: the last allowed)")
    parser.add_argument(
        "--dynamo", metavar="PYTHON", help="an interpreter with ai-dynamo-runtime 1.6.1, to compare"
    )
    return parser


def pinned(core: int | None) -> int:
    """Pin this process to one core and return the core."""
    if not hasattr(os, "sched_setaffinity"):
        return 0
    chosen = max(os.sched_getaffinity(0)) if core is None else core
    os.sched_setaffinity(0, {chosen})
    return chosen


def peer_figures(python: str | None, core: int) -> dict[str, float]:
    """Return Dynamo's figures on the same core (`peer_dynamo.py`), or {} if it is not installed."""
    if python is None:
        return {}
    done = subprocess.run(
        [python, str(PEER), "--core", str(core)],
        capture_output=True,
        text=True,
        timeout=PEER_S_MAX,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"the peer's bench failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    del figures["version"]
    return figures


def beside(figures: Mapping[str, float], name: str) -> dict[str, float]:
    """Return Dynamo's figure of this name as the `others` of a row, or {} if there is none."""
    return {"Dynamo": figures[name]} if name in figures else {}


def show(rows: Iterable[Row], as_json: bool) -> None:
    """Print each row as it comes, or all as JSON."""
    if not as_json:
        for row in rows:
            print(row, flush=True)
        return
    print(json.dumps([asdict(row) | {"reached": row.reached} for row in rows], indent=2))

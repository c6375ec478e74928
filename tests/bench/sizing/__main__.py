"""Measures the tables of docs/sizing.md: the CPU time and memory that a router needs, by load.

    python -m tests.bench.sizing [--only SECTION ...] [--runs 3] [--seconds 2] [--into FILE]

The router, as `serve` starts it, has one core for itself; compiled dummy engines and the load
generator have another. CPU times are those of the router's threads, from the kernel. All of it
takes some 12 minutes. `--into` puts the tables into a page between its two marks.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.dataplane.programs import Cores
from tests.bench.sizing import memory, plan, pools, requests, turns
from tests.bench.sizing.requests import Model
from tests.bench.sizing.table import Section
from tests.bench.tokens import texts, trained

LOOP = 10_000_000
NAMES = ("requests", "turns", "pools", "memory", "plan")
BEGIN, END = "<!-- sizing: begin -->\n", "<!-- sizing: end -->\n"
UNFIT = str.maketrans({'"': "'", "\\": "/", "\n": " ", "\t": " "})  # in a JSON string


def model(folder: Path) -> Model:
    """Write a tokenizer of a common kind to the folder; return it with a text that it encodes as
    compactly as real tokenizers encode theirs.
    """
    words = folder / "words"
    text = " ".join(texts()).translate(UNFIT)
    words.write_text("".join(c for c in text if " " <= c <= "~"))
    return Model(trained(folder / "model"), words)


def sections(only: set[str], runs: int, seconds: float) -> Iterator[Section]:
    """Measure and yield the wanted sections; the plan needs the measurements of the first three."""
    cores = Cores.of_this_machine()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        made = model(folder)
        planned = "plan" in only
        if planned or "requests" in only:
            yield requests.section(costs := requests.measure(made, cores, runs, seconds))
        if planned or "turns" in only:
            yield turns.section(found := turns.measure(made, cores, runs))
        if planned or "pools" in only:
            yield pools.section(sized := pools.measure(cores, runs, seconds))
        if "memory" in only:
            yield memory.section(memory.measure(cores, seconds))
        if planned:
            yield plan.section(plan.Measured(costs, sized, found))


def machine() -> str:
    """Return the processor, the Python version, and the speed of plain Python on this machine, to
    compare machines by.
    """
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    began_s, total = time.process_time(), 0
    for number in range(LOOP):
        total += number
    per_s = LOOP / (time.process_time() - began_s) / 1e6
    return (
        f"Measured on {name}, Python {platform.python_version()}. A loop of plain Python adds "
        f"{per_s:.0f} million numbers a second there; measure yours to compare."
    )


def main() -> None:
    """Print each table once it is measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=NAMES, help="sections, repeated")
    parser.add_argument("--runs", type=int, default=3, help="rounds a median is taken over")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured of each load")
    parser.add_argument("--into", type=Path, help="page that gets the tables")
    options = parser.parse_args()
    parts = [machine()]
    print(f"{parts[0]}\n", flush=True)
    for section in sections(set(options.only or NAMES), options.runs, options.seconds):
        print(f"{section}\n", flush=True)
        parts.append(str(section))
    load = os.getloadavg()[1]
    print(f"load average of the last 5 minutes: {load:.1f}")
    if options.into is not None:
        before, _, rest = options.into.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        text = "\n\n".join(parts)
        options.into.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()

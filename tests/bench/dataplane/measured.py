"""Runs a row of the table: interleaved rounds over all subjects, and medians as Markdown."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.bench.dataplane.programs import Cores
from tests.bench.dataplane.routers import Subject

Figures = Mapping[str, float]  # by the name of a column's figure
OURS = "warmroute"  # the names of our own subjects begin so
FOREIGN = "foreign"  # a figure of every subject: cores that other programs used
TRIES = 5  # tries of a measurement that needs a quiet machine
FAILED = "failed"  # share of requests without a whole answer, if there are any


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: the key, name and bound of a figure."""

    name: str  # key in what is measured
    shown: str
    bar: float | str | None = None
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings that every row of the bench gets: cores, number of runs, seconds and
    subjects.
    """

    cores: Cores
    runs: int
    seconds: float  # measured of each load
    subjects: Sequence[Subject]
    quiet: float = math.inf  # cores that other programs may use


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the bench. `measure` returns a subject's figures of one round, or raises
    RuntimeError with the reason why the subject has no figures.
    """

    name: str
    figures: Sequence[Figure]
    measure: Callable[[Bench, Subject], Figures]
    without: tuple[str, ...] = ()  # subjects that the row does not measure
    ours_only: bool = False

    def wants(self, subject: Subject) -> bool:
        """Return whether the row measures the subject."""
        if subject.missing or subject.name in self.without:
            return False
        return subject.name.startswith(OURS) or not self.ours_only


@dataclass(slots=True)
class Results:
    """All figures of a row: subject -> figure -> one value for each round."""

    row: Row
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # subject -> reason of its last failure

    def median(self, subject: str, figure: str) -> float | None:
        values = self.values.get(subject, {}).get(figure)
        return statistics.median(values) if values else None


def run(row: Row, bench: Bench) -> Results:
    """Run a row's rounds one after the other, each over all subjects."""
    results = Results(row)
    for _ in range(bench.runs):
        for subject in filter(row.wants, bench.subjects):
            try:
                figures = quietest(row, bench, subject)
            except RuntimeError as error:
                results.failures[subject.name] = str(error).partition("\n")[0]
                print(f"{row.name}: {subject.name}: {error}", file=sys.stderr, flush=True)
                continue
            kept = results.values.setdefault(subject.name, {})
            for name, value in figures.items():
                kept.setdefault(name, []).append(value)
            shown = "  ".join(f"{name} {value:.2f}" for name, value in figures.items())
            print(f"{row.name:10} {subject.name:24} {shown}", file=sys.stderr, flush=True)
    return results


def quietest(row: Row, bench: Bench, subject: Subject) -> Figures:
    """Measure up to `TRIES` times until other programs are quiet; return the quietest
    measurement.
    """
    figures = row.measure(bench, subject)
    for _ in range(TRIES - 1):
        if figures[FOREIGN] <= bench.quiet:
            break
        again = row.measure(bench, subject)
        figures = min(figures, again, key=lambda f: f[FOREIGN])
    return figures


def table(all_results: Sequence[Results], subjects: Sequence[Subject]) -> str:
    """Return a Markdown table with a line for each figure and a column for each measured
    subject.
    """
    names = [s.name for s in subjects if any(s.name in r.values for r in all_results)]
    lines = [f"| measure | bar | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for results in all_results:
        for figure in results.row.figures:
            cells = [_cell(results.median(name, figure.name), figure.digits) for name in names]
            bar = "" if figure.bar is None else str(figure.bar)
            lines.append(f"| {figure.shown} | {bar} | {' | '.join(cells)} |")
    lines.append("")
    for results in all_results:
        values = [v for s in results.values.values() for v in s.get(FOREIGN, [])]
        if values:
            lines.append(
                f"- `{results.row.name}`: others kept {statistics.median(values):.2f} cores busy "
                f"({min(values):.2f} to {max(values):.2f})."
            )
        for name in results.values:
            if share := results.median(name, FAILED):
                lines.append(f"- `{results.row.name}`: {name} failed {share:.1%} of requests.")
        for name, why in results.failures.items():
            lines.append(f"- `{results.row.name}`: {name}: {why}.")
    lines += [f"- {s.name}: {s.missing}." for s in subjects if s.missing]
    return "\n".join(lines)


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"

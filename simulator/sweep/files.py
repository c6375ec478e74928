"""A sweep as CSV, a line for each run, and as JSON, with intervals and fronts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from simulator.replay.setup import Setup
from simulator.report.aggregate import Interval
from simulator.report.row import ReplayRow
from simulator.sweep.pareto import front
from simulator.sweep.points import PER_GPU, PER_USER, Point, measured, varied_of
from simulator.sweep.points import flat_setup as flat
from simulator.sweep.table import by_world
from simulator.sweep.task import Outcome

FORMAT: Literal["warmroute-sweep-report"] = "warmroute-sweep-report"
VERSION: Literal[1] = 1


class SweepRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: what was asked, and the row or why there is none."""

    key: str
    setup: Setup
    row: ReplayRow | None
    error: str | None


class SweepPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All seeds of one choice."""

    name: str
    policy: str  # its specification
    varied: dict[str, Any]
    seeds: tuple[int, ...]
    figures: dict[str, Interval | None]
    on_front: bool  # of tokens/s/GPU against tokens/s/user, among points of its world


class SweepReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. `version` grows when a field changes."""

    format: Literal["warmroute-sweep-report"]
    version: Literal[1]
    runs: tuple[SweepRun, ...]
    points: tuple[SweepPoint, ...]


def as_json(outcomes: Sequence[Outcome], points: Sequence[Point]) -> bytes:
    """The file's bytes: the same runs give the same, but for the seconds they took."""
    leading = {
        id(point) for own in by_world(points).values() for point in front(own, PER_GPU, PER_USER)
    }
    report = SweepReport(
        FORMAT,
        VERSION,
        tuple(SweepRun(o.task.key, o.task.setup, o.row, o.error) for o in outcomes),
        tuple(
            SweepPoint(
                point.name,
                point.setup.policy,
                dict(point.varied),
                tuple(row.seed for row in point.rows),
                dict(point.figures),
                id(point) in leading,
            )
            for point in points
        ),
    )
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """A line for each run that ended well: what was varied, then every figure of its row.

    Lists and mappings are JSON in one cell; empty: nothing was measured.
    """
    done = [outcome for outcome in outcomes if outcome.row is not None]
    varied = varied_of([outcome.task.setup for outcome in done])
    lines = [_line(outcome, varied) for outcome in done]
    names = dict.fromkeys(name for line in lines for name in line)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def _line(outcome: Outcome, varied: Sequence[str]) -> dict[str, Any]:
    setup, row = outcome.task.setup, outcome.row
    assert row is not None
    settings = flat(setup)
    line = {"key": outcome.task.key, "spec": setup.policy}
    line.update({f"varied.{name}": _cell(settings.get(name)) for name in varied})
    for name, value in msgspec.to_builtins(row).items():
        if name in ("ttft_ms", "tpot_ms", "e2e_ms", "goodput"):
            line.update({f"{name}.{key}": _cell(inner) for key, inner in value.items()})
        else:
            line[name] = _cell(value)
    extra = measured(setup, row)
    line.update({name: _cell(extra[name]) for name in (PER_GPU.name, PER_USER.name)})
    return line


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list | tuple):
        return msgspec.json.encode(value).decode()
    return "" if value is None else value

"""A sweep in the terminal: for each load the best by each figure, then the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from simulator.report.figures import Figure, figure
from simulator.sweep.pareto import front
from simulator.sweep.points import PER_GPU, PER_USER, Point, best

TARGETS = (
    figure("ttft_ms.p90"), figure("ttft_ms.p99"), figure("tpot_ms.mean"), figure("goodput.share"),
    figure("hit_rate_tokens"), PER_GPU,
)  # fmt: skip
MAX_TABLES = 12


def by_scene(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points that can be compared: those of one world at one load."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(" ".join(filter(None, [point.scene, point.load])), []).append(point)
    return groups


def by_world(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each world, whatever their load."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.scene, []).append(point)
    return groups


def best_tables(points: Sequence[Point]) -> list[Table]:
    """For each world and load, the best by each figure and the next best; at most a dozen."""
    groups = list(by_scene(points).items())
    return [_best_table(where or "all choices", own) for where, own in groups[:MAX_TABLES]]


def front_table(points: Sequence[Point]) -> Table:
    """Output per GPU against speed per user: the front of each world, over all its loads."""
    table = Table(
        title="Pareto front: tokens/s/GPU against tokens/s/user",
        title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("choice", overflow="fold")
    for one in (PER_GPU, PER_USER, TARGETS[0]):
        table.add_column(one.title, justify="right", no_wrap=True)
    for own in list(by_world(points).values())[:MAX_TABLES]:
        for point in front(own, PER_GPU, PER_USER):
            cells = [said(one, point) for one in (PER_GPU, PER_USER, TARGETS[0])]
            table.add_row(escape(point.name), *cells)
    return table


def said(one: Figure, point: Point) -> str:
    """The figure with what stands after ±."""
    found = point.figures[one.name]
    if found is None or not found.half:
        return one.show(None if found is None else found.mean)
    return f"{one.show(found.mean)} ±{one.show(found.half)}"


def _best_table(title: str, points: Sequence[Point]) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_lines=False
    )
    table.add_column("best by", no_wrap=True)
    table.add_column("choice", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("next", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for one in TARGETS:
        ranked = best(points, one)
        if not ranked:
            continue
        cells = [cell for point in ranked[:2] for cell in (escape(point.choice), said(one, point))]
        table.add_row(one.title, *cells, *[""] * (4 - len(cells)))
    return table

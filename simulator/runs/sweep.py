"""The commands `warmroute-sim sweep` and `plan`, from their options to tables, files and a page."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from csv import DictWriter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from policies.load import name_of
from simulator.replay.setup import Setup
from simulator.report.figures import TTFT as MEAN_TTFT
from simulator.report.figures import (
    Figure,
    Interval,
    Ratio,
    difference_text,
    figure,
    figure_table,
    marks,
    mean_resolved,
    mean_text,
    more_seeds,
    paired,
    paired_ratio,
    seeds_needed,
)
from simulator.report.page import Page, Picture, Section, Table
from simulator.report.plots import Band, Line, front_plot, line_plot
from simulator.report.row import ReplayRow
from simulator.runs.plan import PlanRequest, plan, plan_lines, plan_table
from simulator.runs.plan import as_json as plan_as_json
from simulator.runs.points import (
    OURS,
    PER_GPU,
    PER_USER,
    Point,
    beside,
    best,
    front,
    measured,
    points_of,
    varied_of,
)
from simulator.runs.points import flat_setup as flat
from simulator.runs.runs import RunOptions, RunResults, sweep
from simulator.runs.runs import evaluate as evaluate_replay
from simulator.runs.sheet import read_sheet
from simulator.runs.task import Evaluate, RunOutcome

TARGETS = (
    figure("ttft_ms.p90"), figure("ttft_ms.p99"), figure("tpot_ms.mean"), figure("goodput.share"),
    figure("hit_rate_tokens"), PER_GPU,
)  # fmt: skip
MAX_TABLES = 12
MORE = "seeds in the sweep file, each another draw of a trace with resample: true"


def by_scene(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return groups of points that can be compared, which are those of one scene at one load."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(" ".join(filter(None, [point.scene, point.load])), []).append(point)
    return groups


def by_world(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of each scene, whatever their load."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.scene, []).append(point)
    return groups


def best_tables(points: Sequence[Point]) -> list[RichTable]:
    """Return a table for each scene and load, with the best point and the next best one by each
    figure. There are at most `MAX_TABLES` tables.
    """
    groups = list(by_scene(points).items())
    return [_best_table(where or "all choices", own) for where, own in groups[:MAX_TABLES]]


def front_table(points: Sequence[Point]) -> RichTable:
    """Return a table of the Pareto front of each scene, over all its loads.

    The front is of output tokens per second and GPU against speed per user.
    """
    figures = (PER_GPU, PER_USER, TARGETS[0])
    table = _rich_table("Pareto front: tokens/s/GPU against tokens/s/user")
    table.add_column("choice", overflow="fold")
    for one in figures:
        table.add_column(one.title, justify="right", no_wrap=True)
    for own in list(by_world(points).values())[:MAX_TABLES]:
        for point in front(own, PER_GPU, PER_USER):
            cells = [mean_text(one, point.figures[one.name]) for one in figures]
            table.add_row(escape(point.name), *cells)
    return table


def _best_table(title: str, points: Sequence[Point]) -> RichTable:
    table = _rich_table(title)
    table.add_column("best by", no_wrap=True)
    for name in ("choice", "next"):
        table.add_column(name, overflow="fold")
        table.add_column("value", justify="right", no_wrap=True)
    table.add_column("best beside next", justify="right", no_wrap=True)
    paired: dict[str, Ratio | Interval | None] = {}
    for one in TARGETS:
        ranked = best(points, one)[:2]
        cells = [
            cell
            for point in ranked
            for cell in (escape(point.choice), mean_text(one, point.figures[one.name]))
        ]
        if ranked:
            paired[one.title] = beside(one, *ranked) if len(ranked) > 1 else None
            cells += [""] * (4 - len(cells))
            table.add_row(one.title, *cells, _difference_cell(paired[one.title]))
    wanted = seeds_needed(paired)
    table.caption = f"{wanted}\n" if wanted else None
    return table


def _difference_cell(found: Ratio | Interval | None) -> str:
    """Return a ratio, or a difference in percentage points, as text.

    Returns "" if there is no next point, or no common seed.
    """
    if found is None:
        return ""
    said = difference_text(found)
    return said.replace(" ", " points ", 1) if isinstance(found, Interval) else said


def _rich_table(title: str) -> RichTable:
    return RichTable(
        title=title,
        title_justify="left",
        caption_justify="left",
        caption_style="dim",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


# The horizontal axis: the first of these that a sweep varies.
AXES = {
    "rate_per_s": "requests per second",
    "speed": "times as fast as recorded",
    "workers": "workers",
}
MAX_LINES = 8  # that can be told apart in one picture

Curve = Sequence[tuple[float, Interval]]


@dataclass(frozen=True, slots=True)
class LoadPicture:
    """The lines of one picture of a figure against load, for one fleet. Lifetime: report."""

    title: str  # the fleet, where several are tried
    xlabel: str
    curves: dict[str, Curve]
    left_out: int  # lines beyond those that can be told apart: the worst ones


def load_pictures(points: Sequence[Point], figure: Figure) -> list[LoadPicture]:
    """Return a picture for each fleet of the points of one scene; [] if no load varies."""
    axis = next((name for name in AXES if any(name in p.varied for p in points)), None)
    if axis is None:
        return []
    groups: dict[str, dict[str, list[tuple[float, Interval]]]] = {}
    for point in points:
        found, load = point.figures[figure.name], point.varied.get(axis)
        if found is None or load is None:
            continue
        curves = groups.setdefault(_fleet(point, axis), {})
        curves.setdefault(point.setup.policy, []).append((float(load), found))
    return [_picture(title, AXES[axis], curves) for title, curves in groups.items()]


def _picture(
    title: str, xlabel: str, curves: dict[str, list[tuple[float, Interval]]]
) -> LoadPicture:
    ranked = sorted(curves, key=lambda name: _level(curves[name]))
    kept = [name for name in curves if name in ranked[:MAX_LINES]]
    lines: dict[str, Curve] = {
        name: sorted(curves[name], key=lambda pair: pair[0]) for name in kept
    }
    return LoadPicture(title, xlabel, lines, len(curves) - len(kept))


def _level(curve: Curve) -> float:
    """Return the mean logarithm of a curve's values over all loads. By it the lines to show are
    chosen, so that no single load decides.
    """
    return sum(math.log(max(found.mean, 1e-3)) for _, found in curve) / len(curve)


def _fleet(point: Point, axis: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.fleet.items() if name != axis)


FORMAT: Literal["warmroute-sweep-report"] = "warmroute-sweep-report"
VERSION: Literal[1] = 1


class SweepRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a sweep: its settings, and its row or its error."""

    key: str
    setup: Setup
    row: ReplayRow | None
    error: str | None


class SweepPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All seeds of one policy and set-up of a sweep."""

    name: str
    policy: str  # its specification
    varied: dict[str, Any]
    seeds: tuple[int, ...]
    figures: dict[str, Interval | None]
    on_front: bool  # of tokens/s/GPU against tokens/s/user, among points of its world
    versus: str | None = None  # the first policy of the same fleet, load and world; null for itself
    ttft_ratio: Ratio | None = None  # mean TTFT over that one's, over paired seeds
    good_difference: Interval | None = None  # share of good answers minus that one's
    more_seeds: dict[str, int | None] = {}  # that would resolve `ttft` and `good` to 3 %


class SweepReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole JSON file of a sweep. `version` grows when a field changes."""

    format: Literal["warmroute-sweep-report"]
    version: Literal[1]
    runs: tuple[SweepRun, ...]
    points: tuple[SweepPoint, ...]


def as_json(outcomes: Sequence[RunOutcome], points: Sequence[Point]) -> bytes:
    """Return the bytes of the JSON file: equal runs give equal bytes, except for seconds taken."""
    leading = {
        id(point) for own in by_world(points).values() for point in front(own, PER_GPU, PER_USER)
    }
    firsts: dict[bytes, Point] = {}
    told = []
    for point in points:
        first = firsts.setdefault(msgspec.json.encode(point.varied), point)
        told.append(_point(point, first, id(point) in leading))
    report = SweepReport(
        FORMAT,
        VERSION,
        tuple(SweepRun(o.task.key, o.task.setup, o.row, o.error) for o in outcomes),
        tuple(told),
    )
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def _point(point: Point, first: Point, on_front: bool) -> SweepPoint:
    found = SweepPoint(
        point.name,
        point.setup.policy,
        dict(point.varied),
        tuple(row.seed for row in point.rows),
        dict(point.figures),
        on_front,
    )
    if point is first:
        return found
    ttft = paired_ratio(figure(MEAN_TTFT).of, point.rows, first.rows)
    good = paired(GOOD, point.rows, first.rows)
    return msgspec.structs.replace(
        found,
        versus=first.setup.policy,
        ttft_ratio=ttft,
        good_difference=good,
        more_seeds={"ttft": more_seeds(ttft), "good": more_seeds(good)},
    )


def as_csv(outcomes: Sequence[RunOutcome]) -> str:
    """Return one CSV line for each run that ended well: its varied settings, then every figure.

    Lists and mappings are JSON in one cell; an empty cell means that nothing was measured.
    """
    done = [outcome for outcome in outcomes if outcome.row is not None]
    varied = varied_of([outcome.task.setup for outcome in done])
    lines = [_line(outcome, varied) for outcome in done]
    names = dict.fromkeys(name for line in lines for name in line)
    buffer = io.StringIO()
    writer = DictWriter(buffer, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def _line(outcome: RunOutcome, varied: Sequence[str]) -> dict[str, Any]:
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


TTFT, HITS, GOOD = figure("ttft_ms.p90"), figure("hit_rate_tokens"), figure("goodput.share")
GOOD_ENOUGH = 0.9  # share of requests
LEAST_APART = 0.05  # of numbered points, as a share of the picture
MAX_PICTURES = 6  # of load
MAX_SCENES = 6
MAX_LOADS = 12  # in the table of the best
MAX_POINTS = 500  # in the table of all
ALL_FIGURES = tuple(one for one in OURS if one.name not in ("rejected", "failed"))


def render_page(
    outcomes: Sequence[RunOutcome], points: Sequence[Point], title: str, notes: Sequence[str] = ()
) -> str:
    """Return the whole HTML page; `notes` say how the sweep was done, a paragraph each."""
    worlds = by_world(points)
    sections = [
        _bests(points),
        *(part for name, own in list(worlds.items())[:MAX_SCENES] for part in _scene(name, own)),
        _all(points),
        _failures(outcomes),
    ]
    left_out = len(worlds) - MAX_SCENES
    more = [f"{left_out} more worlds are in the tables only."] if left_out > 0 else []
    shown = [section for section in sections if section]
    cells = [cell for part in shown for table in part.tables for cell in table.cells]
    cells += [said for part in shown for one in part.pictures for _, said in one.items]
    told = story(outcomes, points)
    return Page(title, told, (), shown, [*more, *notes], marks=marks(cells, MORE)).html()


def story(outcomes: Sequence[RunOutcome], points: Sequence[Point]) -> list[str]:
    """Return the results of the sweep in sentences."""
    failed = sum(outcome.error is not None for outcome in outcomes)
    lost = f"; {failed} runs failed and are listed below" if failed else ""
    lines = [f"{len(outcomes):,} runs of {len(points):,} choices{lost}."]
    quick = best(points, TTFT)
    if len(by_scene(points)) == 1 and len(quick) > 1:
        first, second = quick[:2]
        lines.append(
            f"First tokens come soonest with {first.choice}: nine of ten within "
            f"{TTFT.with_unit(first.mean(TTFT.name))}, against "
            f"{TTFT.with_unit(second.mean(TTFT.name))} with the next best, {second.choice}."
        )
    good = [point for point in points if (point.mean(GOOD.name) or 0.0) >= GOOD_ENOUGH]
    dear = best(good, PER_GPU)
    if dear:
        top = dear[0]
        lines.append(
            f"Most output per GPU where {GOOD_ENOUGH:.0%} of requests are within the goodput "
            f"limits: {PER_GPU.with_unit(top.mean(PER_GPU.name))} with {top.name}."
        )
    elif points:
        lines.append(f"Nowhere are {GOOD_ENOUGH:.0%} of requests within the goodput limits.")
    return lines


def _scene(scene: str, points: Sequence[Point]) -> Sequence[Section]:
    """Return the sections of the page with the pictures of one scene."""
    fronts = [
        _front(points, PER_USER, PER_GPU, "Speed of one answer against output per GPU."),
        _front(points, HITS, TTFT, "Hit rate against time to first token."),
    ]
    text = (
        "Numbered and joined: the Pareto front, points that no other beats in both figures; of "
        "those that lie close together one bears a number. Faint: points that turned away or lost "
        "more than 1 % of requests."
    )
    title = scene or "What can be had together"
    loads = [_load(each) for each in load_pictures(points, TTFT)[:MAX_PICTURES]]
    return (
        Section(title, text, pictures=[one for one in fronts if one]),
        Section(f"Under load{f': {scene}' if scene else ''}", pictures=loads),
    )


def _front(points: Sequence[Point], first: Figure, second: Figure, caption: str) -> Picture | None:
    known = [p for p in points if None not in (p.mean(first.name), p.mean(second.name))]
    if not known:
        return None
    leading = front(known, first, second)
    numbered = _numbered(leading, known, first, second)
    alt = f"{caption} Pareto front: " + "; ".join(
        f"{point.name}: {first.with_unit(point.mean(first.name))}, "
        f"{second.with_unit(point.mean(second.name))}"
        for point in numbered.values()
    )
    unit = f"ms {second.title}" if second.unit == "ms" else second.title
    items = [
        (
            point.name,
            f"{mean_text(first, point.figures[first.name])} {first.title}, "
            f"{mean_text(second, point.figures[second.name])} {unit}",
        )
        for point in numbered.values()
    ]

    def place(point: Point) -> tuple[float, float]:
        return _shown(point, first), _shown(point, second)

    groups: dict[str, list[tuple[float, float, bool]]] = {}
    for point in known:
        groups.setdefault(name_of(point.setup.policy), []).append((*place(point), point.serves))
    svg = front_plot(
        groups,
        [place(point) for point in leading],
        {number: place(point) for number, point in numbered.items()},
        *(f"{one.title}{', s' if one.unit == 'ms' else ''}" for one in (first, second)),
        percent=first.show(0.5).endswith("%"),
        log=second.unit == "ms",
    )
    return Picture(svg, alt, caption, items)


def _shown(point: Point, one: Figure) -> float:
    mean = point.mean(one.name)
    assert mean is not None
    return mean / 1000 if one.unit == "ms" else mean


def _numbered(
    leading: Sequence[Point], points: Sequence[Point], first: Figure, second: Figure
) -> Mapping[int, Point]:
    """Return the points of the front, numbered from 1.

    Of a crowded front, only points whose numbers do not cover each other are returned.
    """
    spans = [_span([_place(point, one) for point in points]) for one in (first, second)]
    picked: list[tuple[Point, list[float]]] = []
    for point in leading:
        place = [_place(point, one) for one in (first, second)]
        apart = (
            max(abs(a - b) / span for a, b, span in zip(place, other, spans, strict=True))
            for _, other in picked
        )
        if all(share >= LEAST_APART for share in apart):
            picked.append((point, place))
    return {number: point for number, (point, _) in enumerate(picked, 1)}


def _place(point: Point, one: Figure) -> float:
    """Return the position of a point on the axis of a figure; axes of times are logarithmic."""
    mean = point.mean(one.name)
    assert mean is not None
    return math.log(max(mean, 1e-3)) if one.unit == "ms" else mean


def _span(places: Sequence[float]) -> float:
    return (max(places) - min(places)) or 1.0


def _load(shown: LoadPicture) -> Picture:
    alt = f"{TTFT.title} against {shown.xlabel}. " + "; ".join(
        f"{name}: " + ", ".join(f"{load:g}: {TTFT.with_unit(found.mean)}" for load, found in curve)
        for name, curve in shown.curves.items()
    )
    caption = f"{TTFT.title} against {shown.xlabel}"
    caption += f", {shown.title}" if shown.title else ""
    caption += ". Shaded: 95 % interval over seeds, where it is resolved."
    caption += f" {shown.left_out} slower lines are left out." if shown.left_out else ""
    lines, bands = dict[str, Line](), dict[str, Band]()
    for name, curve in shown.curves.items():
        means = [found.mean / 1000 for _, found in curve]
        known = (found.half if mean_resolved(TTFT, found) else None for _, found in curve)
        half = [(one or 0.0) / 1000 for one in known]
        lines[name] = ([load for load, _ in curve], means)
        # An interval may reach below 0, which a logarithmic axis cannot show.
        low = [max(mean - part, mean / 100) for mean, part in zip(means, half, strict=True)]
        bands[name] = (low, [mean + part for mean, part in zip(means, half, strict=True)])
    svg = line_plot(lines, shown.xlabel, f"{TTFT.title}, s", log="y", points=True, bands=bands)
    return Picture(svg, alt, caption)


def _bests(points: Sequence[Point]) -> Section:
    """Return the section of the page with the best point by each figure, for each scene
    and load.
    """
    groups = list(by_scene(points).items()) if points else []
    rows = []
    for where, own in groups[:MAX_LOADS]:
        ranked = [(one, best(own, one)) for one in TARGETS]
        cells = [_best_cell(one, top) for one, top in ranked]
        rows.append((where or "all choices", *cells))
    head = ("at", *(one.title for one in TARGETS))
    more = len(groups) - MAX_LOADS
    return Section(
        "Best by each figure",
        "Among choices that served at least 99 % of requests, where there is one. Means over seeds "
        "± 95 % interval; times in ms. Beside the next best: geometric mean of ratios, or mean "
        "difference of shares, of paired seeds, with its 95 % interval."
        f"{f' {more} more are in the CSV.' if more > 0 else ''}",
        tables=[Table(head, rows, words=True)] if rows else [],
    )


def _best_cell(one: Figure, ranked: Sequence[Point]) -> str:
    if not ranked:
        return ""
    lines = [ranked[0].choice, mean_text(one, ranked[0].figures[one.name])]
    if len(ranked) > 1 and (paired := _difference_cell(beside(one, *ranked[:2]))):
        lines += [paired, f"beside {ranked[1].choice}"]
    return "\n".join(lines)


def _all(points: Sequence[Point]) -> Section:
    more = f", the first {MAX_POINTS}" if len(points) > MAX_POINTS else ""
    rows = {point.name: point.figures for point in points[:MAX_POINTS]}
    table = figure_table(rows, ALL_FIGURES, head="choice", summary=f"All points{more}")
    terms = [(one.title, one.meaning) for one in ALL_FIGURES]
    return Section("All figures", tables=[table], terms=terms) if points else Section("")


def _failures(outcomes: Sequence[RunOutcome]) -> Section:
    lines = [
        f"{o.task.setup.policy}, seed {o.task.setup.seed}: {o.error}"
        for o in outcomes
        if o.error is not None
    ]
    return Section("Failed runs", lines=lines)


RESULTS_SUFFIX = ".results.jsonl"


def run_sweep(
    file: Path,
    options: RunOptions,
    console: Console,
    *,
    csv: Path | None = None,
    json: Path | None = None,
    html: Path | None = None,
    evaluate: Evaluate = evaluate_replay,
) -> bool:
    """Run the sweep, print its tables, write the files asked for, and return True if no run failed.

    Results are kept beside the sweep file, with `RESULTS_SUFFIX`, unless `options` name another
    file. Raises `SweepError` before anything runs for what cannot be read or run. Ctrl-C
    (`KeyboardInterrupt`) ends all processes; the same command resumes from there.
    """
    setups = read_sheet(file)
    results = options.results or file.with_name(file.name + RESULTS_SUFFIX)
    outcomes = sweep(setups, replace(options, results=results), console, evaluate)
    points = points_of(outcomes)
    tables = best_tables(points)
    console.print(*tables)
    left_out = len(by_scene(points)) - MAX_TABLES
    if left_out > 0:
        console.print(f"{left_out} more loads and worlds are in --csv, --json and --html")
    if points:
        tables.append(front_table(points))
        console.print(tables[-1])
    cells = (str(cell) for table in tables for part in table.columns for cell in part.cells)
    if legend := marks(cells, MORE):
        console.print(legend, markup=False, highlight=False)
    if csv is not None:
        csv.write_text(as_csv(outcomes))
    if json is not None:
        json.write_bytes(as_json(outcomes, points))
    if html is not None:
        notes = [
            f"Sweep file {file.name}. Workload: {setups[0].workload.source}.",
            "Replays of the real decision core and scheduler on virtual time; all seeds of a "
            "choice see the same workload as the same seeds of the others.",
        ]
        page = render_page(outcomes, points, f"Sweep {file.name}", notes)
        html.write_text(page)
    return all(outcome.error is None for outcome in outcomes)


def run_plan(
    request: PlanRequest,
    options: RunOptions,
    console: Console,
    json: Path | None = None,
    evaluate: Evaluate = evaluate_replay,
) -> bool:
    """Run a plan, print the answer and its reasons, write the file `json`, and return True if there
    is an answer. Raises `SweepError` and `KeyboardInterrupt` as `run_sweep` does.
    """
    with RunResults(options, console, evaluate) as runs:
        answer = plan(request, runs)
    console.print(plan_table(answer))
    for line in plan_lines(answer):
        console.print(line, highlight=False)
    if json is not None:
        json.write_bytes(plan_as_json(answer))
    return answer.best is not None

"""Shows the comparison that `warmroute-sim compare` makes: as tables, as Markdown and as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.text import Text

from policies.load import name_of
from policies.near import did_you_mean
from simulator.replay.setup import Setup
from simulator.report.figures import (
    NOTHING,
    Ratio,
    fine,
    marks,
    named_parts,
    percent,
    points_text,
    ratio_text,
    seeds_needed,
    whole,
)
from simulator.report.page import Page, Picture, Section, Table
from simulator.report.plots import Line, dots_plot, line_plot
from simulator.runs.scenes import (
    COLLAPSE,
    LEAST_GOOD,
    MAX_TTFT_MS,
    RATIOS,
    Rivalry,
    RuleFigures,
    Saturation,
    Scene,
    SceneFigures,
    SceneLadder,
    compare_scene,
    ladder_of_scenes,
    read_scenes,
    rivalry,
)
from simulator.runs.task import SweepError

Cell = Callable[[RuleFigures], str]
MORE = "seeds in the sweep file, or study --resamples N"


def in_s(value_ms: float | None) -> str:
    """Return milliseconds as seconds with three digits."""
    if value_ms is None:
        return NOTHING
    value = value_ms / 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"


def _spread(rule: RuleFigures) -> str:
    median, worst = in_s(rule.ttft_median_ms), in_s(rule.ttft_worst_ms)
    return f"{in_s(rule.ttft_mean_ms)} ({median} / {worst})"


def _plain_ms(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("TTFT (med/worst)", _spread),
    ("p99", lambda rule: in_s(rule.ttft_p99_ms)),
    ("new", lambda rule: in_s(rule.new_ttft_ms)),
    ("later", lambda rule: in_s(rule.later_ttft_ms)),
    ("later p99", lambda rule: in_s(rule.later_p99_ms)),
    ("held", lambda rule: in_s(rule.held_max_ms)),
    ("E2E", lambda rule: in_s(rule.e2e_mean_ms)),
    ("TPOT p90", lambda rule: _plain_ms(rule.tpot_p90_ms)),
    ("task", lambda rule: in_s(rule.task_mean_ms)),
    ("Jain", lambda rule: fine(rule.fairness)),
    ("hits", lambda rule: percent(rule.hit_rate)),
    ("good", lambda rule: percent(rule.good)),
    ("sessions/h", lambda rule: whole(rule.sessions_per_hour)),
    ("preempt.", lambda rule: whole(rule.preemptions)),
    ("lost", lambda rule: percent(rule.lost_share)),
    ("collapsed", lambda rule: f"{rule.collapsed}/{len(rule.seeds)}"),
    ("good, points", lambda rule: points_text(rule.good_difference)),
    *(
        (title, lambda rule, name=name: ratio_text(rule.ratios.get(name)))
        for name, title in zip(
            RATIOS,
            ("TTFT ratio", "p99 ratio", "E2E ratio", "TPOT ratio", "task ratio"),
            strict=True,
        )
    ),
)


OF_TASKS = ("task", "Jain", "task ratio")  # shown where the workload has groups
BESIDE = "The base beside the best other rule"

# The base's figure in ms, the best other's, which rules that are, and the ratio.
Beside = Callable[[Rivalry], tuple[float | None, float | None, Sequence[str], Ratio | None]]
# Of workloads whose sessions go on, and of those with groups.
IN_SOME: tuple[tuple[str, Beside], ...] = (
    (
        "later p99",
        lambda one: (one.later_p99_ms, one.rival_later_p99_ms, one.rivals_later, one.later_p99),
    ),
    ("task", lambda one: (one.task_ms, one.rival_task_ms, one.rivals_task, one.task)),
)

# Folded on the page, so that the other columns fit a window of 1,280 pixels.
FOLDED = ("E2E", "TPOT p90", "preempt.", "E2E ratio", "TPOT ratio")


def print_scenes(
    console: Console,
    scenes: Sequence[SceneFigures],
    ladders: Sequence[SceneLadder],
    rivals: Sequence[Rivalry],
) -> None:
    """Print the base policy against the best other policies, then each scene (one workload on one
    fleet), the load ladders and the terms. Tables that are too wide for the terminal are printed as
    several.
    """
    if rivals:
        console.print(Text(BESIDE, style="bold"))
        for table in _beside(rivals):
            console.print(*table.in_terminal(console.width))
    for scene in scenes:
        console.print(Text(_heading(scene), style="bold"))
        console.print(*_table(scene).in_terminal(console.width))
        if wanted := _seeds_sentence(scene):
            console.print(f"{wanted}\n", markup=False, highlight=False)
    for steps in ladders:
        console.print(Text(f"{steps.name}: takes so many {steps.load_unit}", style="bold"))
        for found in steps.rules:
            console.print(f"  {found.policy:<32} {taken(found)}", markup=False, highlight=False)
        console.print()
    for line in (*terms(), _marks(scenes, rivals)):
        console.print(Text(line, style="dim"))


def as_markdown(
    scenes: Sequence[SceneFigures], ladders: Sequence[SceneLadder], rivals: Sequence[Rivalry]
) -> str:
    """Return the tables that `print_scenes` prints as Markdown for a document, then the terms."""
    lines: list[str] = []
    if rivals:
        lines += [f"**{BESIDE}**", ""]
        for table in _beside(rivals):
            lines += [*table.in_markdown(), ""]
    for scene in scenes:
        lines += [f"**{_heading(scene)}**", "", *_table(scene).in_markdown(), ""]
        lines += [wanted, ""] if (wanted := _seeds_sentence(scene)) else []
    for steps in ladders:
        lines += [f"**{steps.name}: saturation, {steps.load_unit}**", ""]
        lines += [*_saturations(steps).in_markdown(), ""]
    return "\n".join([*lines, *terms(), _marks(scenes, rivals)]) + "\n"


def _table(
    scene: SceneFigures, columns: Sequence[tuple[str, Cell]] = COLUMNS, summary: str = ""
) -> Table:
    if all(rule.task_mean_ms is None for rule in scene.rules):
        columns = [column for column in columns if column[0] not in OF_TASKS]
    head = ("rule", *(title for title, _ in columns))
    rows = [(rule.policy, *(cell(rule) for _, cell in columns)) for rule in scene.rules]
    base = [line for line, rule in enumerate(scene.rules) if rule.policy == scene.base]
    return Table(head, rows, strong=frozenset(base), summary=summary)


def _beside(found: Sequence[Rivalry]) -> list[Table]:
    in_some = [_rivalries_in(title, found, of) for title, of in IN_SOME]
    return [table for table in (_rivalries(found), *in_some) if table.rows]


def _rivalries(found: Sequence[Rivalry]) -> Table:
    head = ("workload", "TTFT", "best other", "ratio", "good", "best other", "points")
    rows = [
        (
            one.scene,
            in_s(one.ttft_mean_ms),
            f"{in_s(one.rival_ttft_ms)} {', '.join(one.rivals_ttft)}",
            ratio_text(one.ttft),
            percent(one.good),
            f"{percent(one.rival_good)} {', '.join(one.rivals_good)}",
            points_text(one.points),
        )
        for one in found
    ]
    return Table(head, rows)


def _rivalries_in(title: str, found: Sequence[Rivalry], of: Beside) -> Table:
    """Return the table of one figure, with a row for each workload that has it."""
    rows = []
    for one in found:
        own_ms, rival_ms, rivals, ratio = of(one)
        if ratio is not None:
            best = f"{in_s(rival_ms)} {', '.join(rivals)}"
            rows.append((one.scene, in_s(own_ms), best, ratio_text(ratio)))
    return Table(("workload", title, "best other", "ratio"), rows)


def _seeds_sentence(scene: SceneFigures) -> str:
    """Return a sentence on how many more seeds the comparison needs, or "" if it needs none."""
    found = {rule.policy: (rule.ratios["ttft_mean"], rule.good_difference) for rule in scene.rules}
    return seeds_needed(named_parts(found))


def _marks(scenes: Sequence[SceneFigures], rivals: Sequence[Rivalry]) -> str:
    """Return the explanation of the marks that occur in the tables."""
    tables = [*_beside(rivals), *map(_table, scenes)]
    return marks([cell for table in tables for cell in table.cells], MORE)


def _saturations(found: SceneLadder) -> Table:
    return Table(("rule", "takes"), [(rule.policy, taken(rule)) for rule in found.rules])


def taken(found: Saturation) -> str:
    """Return as text the load at which a policy saturates."""
    if found.beyond is not None:
        return f"{found.beyond:g} and more"
    return f"less than {found.below:g}" if found.load is None else f"{found.load:.3g}"


def terms() -> Iterator[str]:
    """Yield the explanations of the words in the tables."""
    yield (
        "Times in s, TPOT in ms; TTFT counts from the arrival at the router. TTFT: mean over "
        "seeds, (median / worst seed). new, later: mean of requests that begin a session, of the "
        "others. held: longest wait at the router."
    )
    yield (
        f"collapsed: seeds with a mean TTFT above {COLLAPSE:g} x the best seed of the best rule, "
        "or 1 % of requests lost. Ratios: geometric mean of paired seeds against the base; good, "
        "points: mean difference to it; with 95 % intervals."
    )
    yield (
        "Best other: of all other rules, by that figure; chosen on every second seed and judged on "
        "the rest, and the other way round. Ratio and points: the base against it."
    )
    yield (
        f"Saturation: where mean TTFT rises above {MAX_TTFT_MS / 1000:g} s or good falls below "
        f"{LEAST_GOOD:.0%}, interpolated between the loads tried."
    )


def _heading(scene: SceneFigures) -> str:
    versus = f"; ratios to {scene.base}" if scene.base else "; the base was not run here"
    seeds = sorted({len(rule.seeds) for rule in scene.rules})
    many = "-".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1]))) if seeds else "0"
    return f"{scene.name}: {many} seeds{versus}"


MAX_LINES = 8  # that can be told apart
MAX_PICTURES = 60


def render_page(
    scenes: Sequence[SceneFigures],
    ladders: Sequence[SceneLadder],
    rivals: Sequence[Rivalry],
    title: str,
    failed: Sequence[str] = (),
) -> str:
    """Return the whole HTML page: the base policy against the best others; a picture and a table of
    each scene; load ladders and terms.
    """
    by_name = {scene.name: scene for scene in scenes}
    sections = [Section(BESIDE, tables=_beside(rivals))] if rivals else []
    sections += [_scene(scene, drawn=n < MAX_PICTURES) for n, scene in enumerate(scenes)]
    sections += [_ladder(found, by_name) for found in ladders]
    sections.append(Section("Failed runs", lines=failed))
    shown = [one for one in sections if one]
    return Page(title, (), (), shown, list(terms()), marks=_marks(scenes, rivals)).html()


def _scene(scene: SceneFigures, *, drawn: bool) -> Section:
    seeds = {
        rule.policy: ([ms / 1000 for ms in rule.ttft_by_seed_ms if ms], rule.ttft_mean_ms / 1000)
        for rule in scene.rules
        if rule.ttft_mean_ms
    }
    pictures = []
    if drawn and seeds:
        alt = f"Mean TTFT, {scene.name}. " + "; ".join(
            f"{rule.policy}: {in_s(rule.ttft_mean_ms)} s, worst seed {in_s(rule.ttft_worst_ms)} s"
            for rule in scene.rules
        )
        caption = "Each dot a seed, bars their means; dashed: above it a seed is collapsed."
        xlabel, limit_s = "mean time to first token of a seed, s", (scene.collapse_ms or 0.0) / 1000
        pictures.append(Picture(dots_plot(seeds, xlabel, limit_s), alt, caption))
    text = f"{scene.workload}, {scene.load:g} {scene.load_unit}. {_seeds_sentence(scene)}"
    rest = _table(scene, [one for one in COLUMNS if one[0] in FOLDED], "Answers to their end")
    tables = [_table(scene, [one for one in COLUMNS if one[0] not in FOLDED]), rest]
    return Section(scene.name, text, pictures=pictures, tables=tables)


def _ladder(found: SceneLadder, scenes: dict[str, SceneFigures]) -> Section:
    says = "; ".join(f"{rule.policy}: {taken(rule)}" for rule in found.rules)
    caption = f"{found.name}: mean TTFT against {found.load_unit}; the line: 2 s."
    lines: dict[str, Line] = {}
    for rule in found.rules[:MAX_LINES]:
        points = [
            (load, one.ttft_mean_ms / 1000)
            for load, name in zip(found.loads, found.scenes, strict=True)
            for one in scenes[name].rules
            if one.policy == rule.policy and one.ttft_mean_ms
        ]
        lines[rule.policy] = ([load for load, _ in points], [mean_s for _, mean_s in points])
    svg = line_plot(
        lines,
        found.load_unit,
        "mean time to first token, s",
        log="y",
        points=True,
        limit=MAX_TTFT_MS / 1000,
    )
    picture = Picture(svg, f"{caption} Saturation: {says}.", caption)
    tables = [_saturations(found)]
    return Section(f"Under load: {found.name}", pictures=[picture], tables=tables)


FORMAT: Literal["warmroute-compare"] = "warmroute-compare"
VERSION: Literal[3] = 3


class CompareReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole JSON file of a comparison. `version` grows when a field changes."""

    format: Literal["warmroute-compare"]
    version: Literal[3]
    base: str
    scenes: tuple[SceneFigures, ...]
    ladders: tuple[SceneLadder, ...]
    rivals: tuple[Rivalry, ...]  # scenes with too few seeds, or without the base, have none
    failed: tuple[str, ...]  # runs without figures


def run_compare(
    results: Sequence[Path],
    base: str,
    console: Console,
    policies: Sequence[str] = (),
    *,
    json: Path | None = None,
    html: Path | None = None,
    markdown: Path | None = None,
) -> bool:
    """Print the tables, write the files asked for, and return True if every run had figures.

    `base` is a specification as it was run, or a name that only one policy has. `policies` limits
    the comparison to these and the base; empty means all. Raises `SweepError` for files that cannot
    be read, and for an unknown policy.
    """
    scenes = read_scenes(results)
    base = _chosen(base, scenes)
    kept = {base, *(_chosen(one, scenes) for one in policies)}
    if policies:
        for scene in scenes:
            scene.rows = {policy: rows for policy, rows in scene.rows.items() if policy in kept}
    found = [compare_scene(scene, base) for scene in scenes if scene.rows]
    steps = ladders_of(scenes, found)
    rivals = [one for scene in scenes if (one := rivalry(scene, base))]
    failed = [f"{scene.name}: {line}" for scene in scenes for line in scene.failed]
    print_scenes(console, found, steps, rivals)
    for line in failed:
        console.print(f"failed: {line}", markup=False, highlight=False)
    report = CompareReport(
        FORMAT, VERSION, base, tuple(found), tuple(steps), tuple(rivals), tuple(failed)
    )
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    if markdown is not None:
        markdown.write_text(as_markdown(found, steps, rivals))
    if html is not None:
        html.write_text(render_page(found, steps, rivals, f"Rules beside {base}", failed))
    return not failed


def ladders_of(scenes: Sequence[Scene], found: Sequence[SceneFigures]) -> list[SceneLadder]:
    """Return a ladder for each group of two or more scenes that differ only by their load."""
    by_name = {figures.name: figures for figures in found}
    groups: dict[tuple[str, str, Setup], list[SceneFigures]] = {}
    for scene in scenes:
        if scene.name in by_name:
            key = (scene.file, scene.load.unit, scene.load.of)
            groups.setdefault(key, []).append(by_name[scene.name])
    several = [
        (file, own) for (file, _, _), own in groups.items() if len({s.load for s in own}) > 1
    ]
    files = [file for file, _ in several]
    return [
        ladder_of_scenes(file if files.count(file) == 1 else f"{file}, as {own[0].name}", own)
        for file, own in several
    ]


def _chosen(asked: str, scenes: Sequence[Scene]) -> str:
    """Return the specification of the policy that was run under the name `asked`. Raises
    `SweepError` if no policy or several match.
    """
    run = list(dict.fromkeys(policy for scene in scenes for policy in scene.rows))
    if asked in run:
        return asked
    same = [policy for policy in run if name_of(policy) == asked]
    if len(same) == 1:
        return same[0]
    if same:
        raise SweepError([f"{asked}: was run as {', '.join(same)}; name one of them"])
    hint = did_you_mean(asked, run)
    raise SweepError([f"{asked}: no result is of it{hint}; there are {', '.join(run) or 'none'}"])

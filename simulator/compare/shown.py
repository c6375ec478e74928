"""A comparison as text: tables for a terminal, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from simulator.compare.figures import COLLAPSE, RATIOS, Ratio, RuleFigures, SceneFigures
from simulator.compare.saturation import LEAST_GOOD, MAX_TTFT_MS, Ladder, Saturation
from simulator.report.tables import Column, policy_tables
from simulator.wording import NOTHING, percent, whole

Cell = Callable[[RuleFigures], str]


def in_s(value_ms: float | None) -> str:
    """Milliseconds as seconds of three digits."""
    if value_ms is None:
        return NOTHING
    value = value_ms / 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"


def _ratio(found: Ratio | None) -> str:
    if found is None:
        return NOTHING
    if found.low is None or found.high is None:
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


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
    ("hits", lambda rule: percent(rule.hit_rate)),
    ("good", lambda rule: percent(rule.good)),
    ("sessions/h", lambda rule: whole(rule.sessions_per_hour)),
    ("preempt.", lambda rule: whole(rule.preemptions)),
    ("lost", lambda rule: percent(rule.lost_share)),
    ("collapsed", lambda rule: f"{rule.collapsed}/{len(rule.seeds)}"),
    *(
        (title, lambda rule, name=name: _ratio(rule.ratios[name]))
        for name, title in zip(
            RATIOS, ("TTFT ratio", "p99 ratio", "E2E ratio", "TPOT ratio"), strict=True
        )
    ),
)


def print_scenes(
    console: Console, scenes: Sequence[SceneFigures], ladders: Sequence[Ladder]
) -> None:
    """One table a scene (several where the terminal is narrow), then the ladders and the terms."""
    for scene in scenes:
        console.print(Text(_heading(scene), style="bold"))
        columns: list[Column] = [
            (title, [Text(f"{cell(rule)} ") for rule in scene.rules]) for title, cell in COLUMNS
        ]
        names = [rule.policy for rule in scene.rules]
        for part in policy_tables(names, columns, console.width):
            console.print(part)
    for ladder in ladders:
        console.print(Text(f"{ladder.name}: takes so many {ladder.load_unit}", style="bold"))
        for found in ladder.rules:
            console.print(f"  {found.policy:<32} {taken(found)}", markup=False, highlight=False)
        console.print()
    for line in terms():
        console.print(Text(line, style="dim"))


def as_markdown(scenes: Sequence[SceneFigures], ladders: Sequence[Ladder]) -> str:
    """The same tables for a document, then the terms."""
    lines: list[str] = []
    for scene in scenes:
        head = ("rule", *(title for title, _ in COLUMNS))
        lines += [f"**{_heading(scene)}**", "", _row(head), _row(["---"] * len(head))]
        for rule in scene.rules:
            lines.append(_row([f"`{rule.policy}`", *(cell(rule) for _, cell in COLUMNS)]))
        lines.append("")
    for ladder in ladders:
        lines += [f"**{ladder.name}: saturation, {ladder.load_unit}**", ""]
        lines += [_row(("rule", "takes")), _row(("---", "---"))]
        lines += [_row((f"`{found.policy}`", taken(found))) for found in ladder.rules]
        lines.append("")
    return "\n".join([*lines, *terms()]) + "\n"


def taken(found: Saturation) -> str:
    """The load at which a rule saturates."""
    if found.beyond is not None:
        return f"{found.beyond:g} and more"
    return f"less than {found.below:g}" if found.load is None else f"{found.load:.3g}"


def terms() -> Iterator[str]:
    """What the words in the tables mean."""
    yield (
        "Times in s, TPOT in ms; TTFT counts from the arrival at the router. TTFT: mean over "
        "seeds, (median / worst seed). new, later: mean of requests that begin a session, of the "
        "others. held: longest wait at the router."
    )
    yield (
        f"collapsed: seeds with a mean TTFT above {COLLAPSE:g} x the best seed of the best rule, "
        "or 1 % of requests lost. Ratios: geometric mean of paired seeds against the base, 95 % "
        "interval."
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


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

"""The pictures of a comparison, as SVG text: seeds as dots, and time against load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.ticker import NullFormatter

from simulator.compare.figures import SceneFigures
from simulator.compare.saturation import MAX_TTFT_MS, Ladder
from simulator.plots import INK, RC, RULE, as_svg, log_labels, log_steps, new_figure
from simulator.report.pictures import styles

COMPARE_WIDTH_IN = 5.6
COMPARE_LINE_IN = 0.2
MAX_LINES = 8  # that can be told apart


def dots_plot(scene: SceneFigures) -> str:
    """Mean TTFT of every seed, a line of dots for each rule, the best on top; a bar: their mean."""
    rules = [rule for rule in scene.rules if rule.ttft_mean_ms]
    height = 0.8 + COMPARE_LINE_IN * max(len(rules), 1)
    with mpl.rc_context(RC):
        figure, axes = new_figure(COMPARE_WIDTH_IN, height)
        values: list[float] = []
        for place, rule in enumerate(rules):
            seeds = [ms / 1000 for ms in rule.ttft_by_seed_ms if ms]
            values += seeds
            assert rule.ttft_mean_ms is not None
            axes.scatter(seeds, [place] * len(seeds), s=14, alpha=0.55, color="#0072B2", lw=0)
            axes.scatter([rule.ttft_mean_ms / 1000], [place], s=70, marker="|", color=INK, lw=1.4)
        if scene.collapse_ms:
            axes.axvline(scene.collapse_ms / 1000, color="#D55E00", lw=0.9, ls=(0, (4, 2)))
        axes.set_xscale("log")
        if values:
            steps = log_steps(min(values), max(values))
            axes.set_xlim(steps[0], steps[-1])
            axes.set_xticks(log_labels(steps))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(rules)), [rule.policy[:34] for rule in rules])
        axes.set(ylim=(len(rules) - 0.5, -0.5), xlabel="mean time to first token of a seed, s")
        axes.grid(True, which="major", axis="x", color=RULE, linewidth=0.5)
        figure.subplots_adjust(left=0.4, top=1 - 0.1 / height, bottom=0.5 / height)
        return as_svg(figure)


def ladder_plot(found: Ladder, scenes: Mapping[str, SceneFigures]) -> str:
    """Mean TTFT against load, a line for each of the rules that take most."""
    names = [rule.policy for rule in found.rules[:MAX_LINES]]
    drawn = styles(names)
    lines = math.ceil(len(names) / 2)
    height = 2.7 + COMPARE_LINE_IN * lines
    with mpl.rc_context(RC):
        figure, axes = new_figure(COMPARE_WIDTH_IN, height)
        values: list[float] = [MAX_TTFT_MS / 1000]
        for name in names:
            points = _points(name, found, scenes)
            colour, dash = drawn[name]
            values += [y for _, y in points]
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=colour, linestyle=dash,
                lw=1.6, marker="o", ms=3, label=name[:34],
            )  # fmt: skip
        axes.axhline(MAX_TTFT_MS / 1000, color=RULE, lw=1.0)
        axes.set_yscale("log")
        steps = log_steps(min(values), max(values))
        axes.set_ylim(steps[0], steps[-1])
        axes.set_yticks(log_labels(steps))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=found.load_unit, ylabel="mean time to first token, s")
        axes.grid(True, which="major", color=RULE, linewidth=0.5)
        figure.subplots_adjust(
            top=1 - (0.15 + COMPARE_LINE_IN * lines) / height, left=0.72 / COMPARE_WIDTH_IN
        )
        figure.legend(frameon=False, loc="upper center", ncols=2, handlelength=2.6)
        return as_svg(figure)


def _points(
    policy: str, found: Ladder, scenes: Mapping[str, SceneFigures]
) -> Sequence[tuple[float, float]]:
    return [
        (load, rule.ttft_mean_ms / 1000)
        for load, name in zip(found.loads, found.scenes, strict=True)
        for rule in scenes[name].rules
        if rule.policy == policy and rule.ttft_mean_ms
    ]

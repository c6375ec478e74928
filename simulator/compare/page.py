"""A comparison as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from simulator.compare.figures import SceneFigures
from simulator.compare.pictures import dots_plot, ladder_plot
from simulator.compare.saturation import Ladder
from simulator.compare.shown import COLUMNS, in_s, taken, terms
from simulator.page import STYLE_PATH, picture

STYLE = """
th, td { text-align: right; } th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; } tr.base td { font-weight: 600; }
.curves { display: grid; gap: 1.4rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
"""
MAX_PICTURES = 60


def render_page(
    scenes: Sequence[SceneFigures],
    ladders: Sequence[Ladder],
    title: str,
    failed: Sequence[str] = (),
) -> str:
    """The whole page: a picture and a table for each scene, then the ladders, then the terms."""
    by_name = {scene.name: scene for scene in scenes}
    body = "".join(_scene(scene, drawn=n < MAX_PICTURES) for n, scene in enumerate(scenes))
    steps = "".join(_ladder(found, by_name) for found in ladders)
    under_load = f'<h2>Under load</h2><div class="curves">{steps}</div>' if steps else ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in failed)
    told = f"<h2>Failed runs</h2><ul>{lines}</ul>" if lines else ""
    words = "".join(f'<p class="soft">{escape(line)}</p>' for line in terms())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>warmroute: {escape(title)}</title>"
        f"<style>{STYLE_PATH.read_text()}{STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{body}{under_load}{told}<h2>Terms</h2>{words}"
        "</main></body></html>\n"
    )


def _scene(scene: SceneFigures, *, drawn: bool) -> str:
    shown = ""
    if drawn and any(rule.ttft_mean_ms for rule in scene.rules):
        alt = f"Mean TTFT, {scene.name}. " + "; ".join(
            f"{rule.policy}: {in_s(rule.ttft_mean_ms)} s, worst seed {in_s(rule.ttft_worst_ms)} s"
            for rule in scene.rules
        )
        told = "Each dot a seed, bars their means; dashed: above it a seed is collapsed."
        caption = f"<figcaption>{told}</figcaption>"
        shown = f"<figure>{picture(dots_plot(scene), alt)}{caption}</figure>"
    head = "".join(f"<th>{escape(title)}</th>" for title, _ in COLUMNS)
    rows = "".join(
        f"<tr{' class=base' if rule.policy == scene.base else ''}>"
        f"<td><code>{escape(rule.policy)}</code></td>"
        + "".join(f"<td>{escape(cell(rule))}</td>" for _, cell in COLUMNS)
        + "</tr>"
        for rule in scene.rules
    )
    return (
        f'<h2>{escape(scene.name)}</h2><p class="soft">{escape(scene.workload)}, '
        f"{scene.load:g} {scene.load_unit}</p>{shown}"
        f'<div class="table"><table><tr><th>rule</th>{head}</tr>{rows}</table></div>'
    )


def _ladder(found: Ladder, scenes: dict[str, SceneFigures]) -> str:
    says = "; ".join(f"{rule.policy}: {taken(rule)}" for rule in found.rules)
    told = f"{found.name}: mean TTFT against {found.load_unit}; the line: 2 s."
    shown = picture(ladder_plot(found, scenes), f"{told} Saturation: {says}.")
    items = "".join(
        f"<tr><td><code>{escape(rule.policy)}</code></td><td>{escape(taken(rule))}</td></tr>"
        for rule in found.rules
    )
    return (
        f"<div><figure>{shown}<figcaption>{escape(told)}</figcaption></figure>"
        f'<div class="table"><table><tr><th>rule</th><th>saturates at</th></tr>{items}</table>'
        "</div></div>"
    )

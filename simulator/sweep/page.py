"""A sweep as one HTML page that needs nothing else: answers, Pareto fronts, load, all points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from simulator.page import STYLE_PATH, picture
from simulator.report.figures import Figure, figure
from simulator.sweep.curves import LoadPicture, load_pictures
from simulator.sweep.pareto import front
from simulator.sweep.pictures import front_plot, load_plot
from simulator.sweep.points import OURS, PER_GPU, PER_USER, Point, best
from simulator.sweep.table import TARGETS, by_scene, by_world, said
from simulator.sweep.task import Outcome

STYLE = """
details { margin-top: 1rem; font-size: .9rem; } summary { cursor: pointer; color: var(--soft); }
.curves { display: grid; gap: 1.4rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
ol.front { font-size: .84rem; margin: .2rem 0 0; padding-left: 1.8rem; }
ol.front li::marker { font-weight: 600; }
ol.front code { font-size: .8rem; overflow-wrap: anywhere; }
th, td { text-align: left; vertical-align: top; }
td { white-space: normal; } h3.load { margin: 1.6rem 0 .8rem; }
td.at { white-space: nowrap; overflow-wrap: normal; }
td:first-child:not(.at) { overflow-wrap: anywhere; }
"""
TTFT, HITS, GOOD = figure("ttft_ms.p90"), figure("hit_rate_tokens"), figure("goodput.share")
GOOD_ENOUGH = 0.9  # share of requests
LEAST_APART = 0.05  # of numbered points, as a share of the picture
MAX_PICTURES = 6  # of load
MAX_SCENES = 6
MAX_LOADS = 12  # in the table of the best
MAX_POINTS = 500  # in the table of all
ALL_FIGURES = tuple(one for one in OURS if one.name not in ("rejected", "failed"))


def render_page(
    outcomes: Sequence[Outcome], points: Sequence[Point], title: str, notes: Sequence[str] = ()
) -> str:
    """The whole page; `notes`: how it was done, a paragraph each."""
    worlds = by_world(points)
    sections = "".join(_scene(name, own) for name, own in list(worlds.items())[:MAX_SCENES])
    left_out = len(worlds) - MAX_SCENES
    told = [f"{left_out} more worlds are in the tables only."] if left_out > 0 else []
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>warmroute: {escape(title)}</title>"
        f"<style>{STYLE_PATH.read_text()}{STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>"
        + _paragraphs("story", story(outcomes, points))
        + (_bests(points) + sections + _all(points) if points else "")
        + _failures(outcomes)
        + "<h2>How it was done</h2>"
        + _paragraphs("soft", [*told, *notes, _terms()])
        + "</main></body></html>\n"
    )


def story(outcomes: Sequence[Outcome], points: Sequence[Point]) -> list[str]:
    """What came out, in sentences."""
    failed = sum(outcome.error is not None for outcome in outcomes)
    lost = f"; {failed} runs failed and are listed below" if failed else ""
    lines = [f"{len(outcomes):,} runs of {len(points):,} choices{lost}."]
    quick = best(points, TTFT)
    if len(by_scene(points)) == 1 and len(quick) > 1:
        first, second = quick[:2]
        lines.append(
            f"First tokens come soonest with {first.choice}: nine of ten within "
            f"{TTFT.said(first.mean(TTFT.name))}, against {TTFT.said(second.mean(TTFT.name))} with "
            f"the next best, {second.choice}."
        )
    good = [point for point in points if (point.mean(GOOD.name) or 0.0) >= GOOD_ENOUGH]
    dear = best(good, PER_GPU)
    if dear:
        top = dear[0]
        lines.append(
            f"Most output per GPU where {GOOD_ENOUGH:.0%} of requests are within the goodput "
            f"limits: {PER_GPU.said(top.mean(PER_GPU.name))} with {top.name}."
        )
    elif points:
        lines.append(f"Nowhere are {GOOD_ENOUGH:.0%} of requests within the goodput limits.")
    return lines


def _scene(scene: str, points: Sequence[Point]) -> str:
    """The pictures of one world."""
    head = f"<h2>{escape(scene)}</h2>" if scene else "<h2>What can be had together</h2>"
    fronts = _front(points, PER_USER, PER_GPU, "Speed of one answer against output per GPU.")
    fronts += _front(points, HITS, TTFT, "Hit rate against time to first token.")
    loads = "".join(_load(each) for each in load_pictures(points, TTFT)[:MAX_PICTURES])
    under_load = (
        f'<h3 class="load">Under load</h3><div class="curves">{loads}</div>' if loads else ""
    )
    return (
        f'{head}<p class="soft">Numbered and joined: the Pareto front, points that no other beats '
        "in both figures; of those that lie close together one bears a number. "
        "Faint: points that turned away or lost more than 1 % of requests.</p>"
        f'<div class="curves">{fronts}</div>{under_load}'
    )


def _front(points: Sequence[Point], first: Figure, second: Figure, told: str) -> str:
    known = [p for p in points if None not in (p.mean(first.name), p.mean(second.name))]
    if not known:
        return ""
    leading = front(known, first, second)
    numbered = _numbered(leading, known, first, second)
    alt = f"{told} Pareto front: " + "; ".join(
        f"{point.name}: {first.said(point.mean(first.name))}, "
        f"{second.said(point.mean(second.name))}"
        for point in numbered.values()
    )
    items = "".join(
        f"<li><code>{escape(point.name)}</code>: {escape(said(first, point))} {first.title}, "
        f"{escape(said(second, point))} {_unit(second)}</li>"
        for point in numbered.values()
    )
    svg = front_plot(known, leading, numbered, first, second)
    return (
        f"<figure>{picture(svg, alt)}<figcaption>{escape(told)}</figcaption>"
        f'<ol class="front">{items}</ol></figure>'
    )


def _numbered(
    leading: Sequence[Point], points: Sequence[Point], first: Figure, second: Figure
) -> Mapping[int, Point]:
    """The front from 1; of a crowded one the points whose numbers do not cover each other."""
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
    """Where it stands along the axis of a figure; times have logarithmic ones."""
    mean = point.mean(one.name)
    assert mean is not None
    return math.log(max(mean, 1e-3)) if one.unit == "ms" else mean


def _span(places: Sequence[float]) -> float:
    return (max(places) - min(places)) or 1.0


def _unit(one: Figure) -> str:
    return f"ms {one.title}" if one.unit == "ms" else one.title


def _load(shown: LoadPicture) -> str:
    alt = f"{TTFT.title} against {shown.xlabel}. " + "; ".join(
        f"{name}: " + ", ".join(f"{load:g}: {TTFT.said(found.mean)}" for load, found in curve)
        for name, curve in shown.curves.items()
    )
    told = f"{TTFT.title} against {shown.xlabel}"
    told += f", {shown.title}" if shown.title else ""
    told += ". Shaded: 95 % interval over seeds."
    told += f" {shown.left_out} slower lines are left out." if shown.left_out else ""
    svg = load_plot(shown.curves, shown.xlabel, TTFT)
    return f"<figure>{picture(svg, alt)}<figcaption>{escape(told)}</figcaption></figure>"


def _bests(points: Sequence[Point]) -> str:
    """For each world and load, the best by each figure."""
    groups = list(by_scene(points).items())
    several = len(groups) > 1
    head = ("<th>at</th>" if several else "") + "".join(f"<th>{t.title}</th>" for t in TARGETS)
    body = ""
    for where, own in groups[:MAX_LOADS]:
        cells = f"<td class=at>{escape(where)}</td>" if several else ""
        for one in TARGETS:
            ranked = best(own, one)
            told = f"{escape(ranked[0].choice)}<br>{escape(said(one, ranked[0]))}" if ranked else ""
            cells += f"<td>{told}</td>"
        body += f"<tr>{cells}</tr>"
    more = len(groups) - MAX_LOADS
    rest = f" {more} more are in the CSV." if more > 0 else ""
    return (
        f'<h2>Best by each figure</h2><p class="soft">Among choices that served at least 99 % of '
        f"requests, where there is one. Means over seeds ± 95 % interval; times in ms.{rest}</p>"
        f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'
    )


def _all(points: Sequence[Point]) -> str:
    head = "".join(f"<th>{escape(one.title)}</th>" for one in ALL_FIGURES)
    body = "".join(
        f"<tr><td>{escape(point.name)}</td>"
        + "".join(f"<td>{escape(said(one, point))}</td>" for one in ALL_FIGURES)
        + "</tr>"
        for point in points[:MAX_POINTS]
    )
    more = f", the first {MAX_POINTS}" if len(points) > MAX_POINTS else ""
    return (
        f"<details><summary>All points{more}</summary>"
        f'<div class="table"><table><tr><th>choice</th>{head}</tr>{body}</table></div></details>'
    )


def _failures(outcomes: Sequence[Outcome]) -> str:
    lines = "".join(
        f"<li>{escape(o.task.setup.policy)}, seed {o.task.setup.seed}: {escape(o.error)}</li>"
        for o in outcomes
        if o.error is not None
    )
    return f"<h2>Failed runs</h2><ul>{lines}</ul>" if lines else ""


def _terms() -> str:
    return " ".join(f"{one.title}: {one.meaning}." for one in ALL_FIGURES)


def _paragraphs(kind: str, texts: Sequence[str]) -> str:
    return "".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts if text)

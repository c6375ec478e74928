"""Live runs as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import msgspec

from simulator import DATA
from simulator.live.outcome import GOOD_GAP_MS, GOOD_TTFT_MS, ResultRow, hot_share
from simulator.live.stack import RunResult
from simulator.report.figures import NOTHING, percent, ratio, seconds, whole
from simulator.report.plots import (
    WORKER_COLOURS,
    busy_plot,
    busy_scale,
    hits_over_time,
    hits_plot,
    share_plot,
    ttft_plot,
    waits_over_time,
    waits_plot,
)

TITLES = {
    "shared_prompt": "One popular prompt",
    "shared_prompts": "Popular prompts",
    "conversation": "Conversations",
    "agents": "Agents in tight memory",
    "live": "Live: one popular prompt over real HTTP",
}
COLUMNS = (
    "workload", "policy", "requests", "rejected", "lost", "max / mean", "hit rate", "TTFT mean",
    "p50", "p90", "p99", "first turns", "later turns", "good", "e2e mean", "out tok/s", "overruns",
    "speed",
)  # fmt: skip
# What the columns mean that need a word; said where they are shown.
GLOSSARY = {
    "max / mean": "Max / mean: requests of the busiest worker over the mean.",
    "hit rate": "Hit rate: prompt tokens found in the workers' caches over prompt tokens asked "
    "for, by the workers' own counters.",
    "first turns": "First and later turns: mean TTFT of those that begin a session, and of those "
    "that go on with one.",
    "good": f"Good: first token within {GOOD_TTFT_MS:g}, mean gap between tokens within "
    f"{GOOD_GAP_MS:g}.",
    "overruns": "Overruns: steps of the timed workers that ended late because this machine was "
    "busy.",
}
NAMELESS = (
    "This endpoint does not name its workers (its replies bear no x-warmroute-worker), so there "
    "is nothing to show of each."
)
# Timed workers run on their model's time, anything else on that of the clock on the wall.
Clock = Literal["model time", "wall time"]
OURS = ("hybrid", "warmset")  # rows that stand out
OF_MODEL_TIME = ("speed",)  # columns that say nothing of a clock on the wall
STYLE_PATH = DATA / "page.css"


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that should be seen, with the figures that say whether it was."""

    text: str
    holds: bool


def render_page(
    runs: Sequence[RunResult],
    story: Sequence[str],
    claims: Sequence[Claim],
    notes: Sequence[str],
    title: str = "The hot spot, its cure, and caches that last",
    clock: Clock = "model time",
) -> str:
    """The whole page: what it shows, pictures per workload, the table, how it was measured."""
    sections = [
        _section(name, [r for r in runs if r.row.workload == name]) for name in _names(runs)
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>warmroute: {escape(title)}</title>"
        f"<style>{STYLE_PATH.read_text()}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>"
        + "".join(f'<p class="story">{escape(text)}</p>' for text in story)
        + _claims(claims)
        + "".join(sections)
        + "<h2>All figures</h2>"
        + _table(runs, clock)
        + "<h2>How it was measured</h2>"
        + "".join(f'<p class="soft">{escape(note)}</p>' for note in notes)
        + "</main></body></html>\n"
    )


def _names(runs: Iterable[RunResult]) -> list[str]:
    return list(dict.fromkeys(run.row.workload for run in runs))


def _claims(claims: Sequence[Claim]) -> str:
    lines = (
        f'<li class="{"yes" if c.holds else "no"}"><b>{"✓" if c.holds else "✗"}</b>'
        f"{'' if c.holds else 'Not shown in this run: '}{escape(c.text)}</li>"
        for c in claims
    )
    return f'<ul class="claims">{"".join(lines)}</ul>'


def _section(name: str, runs: Sequence[RunResult]) -> str:
    until_s = max(run.row.duration_s for run in runs)
    curves = {
        run.row.policy: [o.ttft_ms * run.row.speed for o in run.outcomes if o.ttft_ms is not None]
        for run in runs
    }
    alt = "Curves of the time to first token: " + "; ".join(
        f"{run.row.policy} median {run.row.ttft_ms.p50} ms, p99 {run.row.ttft_ms.p99} ms"
        for run in runs
    )
    return (
        f"<h2>{escape(TITLES.get(name, name))}</h2>"
        + _key(runs[0])
        + f'<div class="runs">{"".join(_run(run, until_s) for run in runs)}'
        f'<figure class="curve">{picture(ttft_plot(curves), alt)}'
        "<figcaption>Share of requests whose first token came within a time "
        "(further left is better; the axis is logarithmic).</figcaption></figure>"
        + _over_time(runs)
        + "</div>"
    )


def _over_time(runs: Sequence[RunResult]) -> str:
    """Waits and hits over time, of workloads that know sessions and their turns."""
    if all(outcome.turn is None for run in runs for outcome in run.outcomes):
        return ""
    # A closed loop's last arrival depends on the answers; all share the time of the longest.
    until_s = max(o.scheduled_s * run.row.speed for run in runs for o in run.outcomes)
    waits = {r.row.policy: waits_over_time(r.outcomes, r.row.speed, until_s) for r in runs}
    pictures = (
        f'<figure class="curve">{picture(waits_plot(waits), _waits_alt(runs))}<figcaption>Mean '
        "time to first token of the turns that arrived then (lower is better; the axis is "
        "logarithmic).</figcaption></figure>"
    )
    if any(run.samples for run in runs):
        hits = {r.row.policy: hits_over_time(r.samples, r.row.speed) for r in runs}
        shares = "; ".join(f"{r.row.policy} {percent(r.row.hit_rate_tokens)}" for r in runs)
        alt = f"Share of prompt tokens found in caches over time; in all: {shares}"
        pictures += (
            f'<figure class="curve">{picture(hits_plot(hits), alt)}<figcaption>Share of prompt '
            "tokens that workers found in their caches.</figcaption></figure>"
        )
    return pictures


def _waits_alt(runs: Sequence[RunResult]) -> str:
    means = "; ".join(
        f"{run.row.policy} first turns {seconds(run.row.new_ttft_ms.mean)}, later turns "
        f"{seconds(run.row.continuation_ttft_ms.mean)}"
        for run in runs
    )
    return f"Mean time to first token over time; in all: {means}"


def _key(run: RunResult) -> str:
    """How to read the pictures of each worker, as far as there are any."""
    if not run.workers:
        return f'<p class="soft">{NAMELESS}</p>'
    told = "Which worker got the requests that arrived then."
    if run.samples:
        told = f"Above: {told[0].lower()}{told[1:]} Below: how busy each of them was."
    return f'<p class="soft">{told}</p>' + _legend(run.workers, busy=bool(run.samples))


def _run(run: RunResult, until_s: float) -> str:
    pictures = ""
    if run.workers:
        pictures += f"<figure>{_share_picture(run)}</figure>"
    if run.samples:
        pictures += f"<figure>{_busy_picture(run, until_s)}</figure>"
    return (
        f"<article><h3>{escape(run.row.policy)}</h3><p>{escape(_told(run.row))}</p>{pictures}"
        "</article>"
    )


def _told(row: ResultRow) -> str:
    told = [f"{row.completed:,} of {row.requests:,} requests completed"]
    if row.continuation_ttft_ms.mean is not None:
        told = [f"{row.completed:,} turns answered, first token after {seconds(row.ttft_ms.mean)}"]
    elif row.workers:
        told = [f"Busiest worker {hot_share(row):.0%} of requests"]
    if row.hit_rate_tokens is not None:
        told.append(f"{row.hit_rate_tokens:.0%} of tokens from cache")
    if row.ttft_ms.p99 is not None:
        told.append(f"slowest 1 % after {seconds(row.ttft_ms.p99)}")
    return ", ".join(told)


def _share_picture(run: RunResult) -> str:
    row = run.row
    counted = zip(row.workers, row.requests_per_worker, strict=True)
    counts = ", ".join(f"{name} {count}" for name, count in counted)
    alt = f"Share of requests over time, {row.policy}: {counts}"
    return picture(share_plot(run.outcomes, run.workers, row.speed), alt)


def _busy_picture(run: RunResult, until_s: float) -> str:
    row = run.row
    shares = zip(row.workers, row.busy_share_per_worker, strict=False)
    busy = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    alt = f"Busy workers over time, {row.policy}: {busy}"
    return picture(busy_plot(run.samples, row.speed, until_s), alt)


def _legend(workers: Sequence[str], busy: bool) -> str:
    swatches = "".join(
        f'<span><i style="background:{WORKER_COLOURS[n % len(WORKER_COLOURS)]}"></i>{escape(name)}'
        "</span>"
        for n, name in enumerate(workers)
    )
    if busy:
        stops = ", ".join(busy_scale())
        gradient = f"background:linear-gradient(90deg, {stops})"
        swatches += f'<span>idle <i class="scale" style="{gradient}"></i>busy</span>'
    return f'<div class="legend">{swatches}</div>'


def row_cells(row: ResultRow) -> list[str]:
    """The cells of one row, in the order of `COLUMNS`."""
    return [
        row.workload,
        row.policy,
        whole(row.requests),
        whole(row.rejected),
        whole(row.failed),
        ratio(row.load_skew),
        percent(row.hit_rate_tokens),
        *(whole(value) for value in msgspec.structs.astuple(row.ttft_ms)),
        whole(row.new_ttft_ms.mean),
        whole(row.continuation_ttft_ms.mean),
        percent(row.good_share),
        whole(row.e2e_ms.mean),
        whole(row.output_tokens_per_s),
        percent(row.overrun_steps_share),
        f"{row.speed:g}",
    ]


def _table(runs: Sequence[RunResult], clock: Clock) -> str:
    """All rows, without the columns that none of them has a figure for, and what they mean."""
    lines = [row_cells(run.row) for run in runs]
    told = [n for n in range(len(COLUMNS)) if any(cells[n] != NOTHING for cells in lines)]
    kept = [n for n in told if clock == "model time" or COLUMNS[n] not in OF_MODEL_TIME]
    names = [COLUMNS[n] for n in kept]
    meanings = " ".join(GLOSSARY[name] for name in names if name in GLOSSARY)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr{' class=ours' if run.row.policy in OURS else ''}>"
        + "".join(f"<td>{escape(cells[n])}</td>" for n in kept)
        + "</tr>"
        for run, cells in zip(runs, lines, strict=True)
    )
    return (
        f'<p class="soft">Times in milliseconds of {clock}. {escape(meanings)}</p>'
        f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'
    )


def picture(svg: str, alt: str) -> str:
    """An `<img>` that carries its picture with it."""
    encoded = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{encoded}">'

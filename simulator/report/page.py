"""Replays as one HTML page that needs nothing else: the answer, then figures, then pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from simulator.page import STYLE_PATH, picture
from simulator.plots import busy_scale
from simulator.report.aggregate import aggregate, by_policy
from simulator.report.console import cell, leaders
from simulator.report.figures import FIGURES, labels
from simulator.report.pictures import copies_plot, curve_plot, hit_plot, split_plot, worker_map
from simulator.report.row import ReplayRow
from simulator.report.stages_shown import stage_section
from simulator.report.verdict import leads_told, verdict
from simulator.report.view import Floats, RunView, hit_rates
from simulator.wording import percent, whole

STYLE = """
details { margin-top: 1rem; font-size: .9rem; } summary { cursor: pointer; color: var(--soft); }
dl.terms { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem;
  font-size: .86rem; color: var(--soft); margin: .8rem 0; }
dl.terms dd { margin: 0; } td.best { font-weight: 600; color: #00734f; }
th:nth-child(2), td:nth-child(2) { text-align: right; }
.curves { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
.curves figure { max-width: 580px; }
"""
SEED_COLUMNS = ("seed", "completed", "rejected", "lost", "retries", "holds", "hash")
CURVES: tuple[tuple[str, str, Callable[[RunView], Floats]], ...] = (
    ("TTFT", "time to first token, s", lambda view: view.ttft_ms),
    ("TPOT", "time per output token, s", lambda view: view.tpot_ms),
    ("End to end", "time to the last token, s", lambda view: view.e2e_ms),
)

TIME_PARTS = ("at the router", "queue and prefill", "decode")
TOKEN_PARTS = ("from cache", "computed", "computed again")

Views = Mapping[str, RunView]


def render_page(
    rows: Sequence[ReplayRow],
    views: Sequence[RunView],
    notes: Sequence[str] = (),
    title: str = "Replay",
) -> str:
    """The whole page.

    `rows`: all seeds of all policies, for the words and the tables. `views`: what is drawn; of
    several views of one policy the first. `notes`: how it was done, a paragraph each.
    """
    drawn = _first_of_each(rows, views)
    told = dict.fromkeys(note for view in drawn.values() for note in view.notes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>warmroute: {escape(title)}</title>"
        f"<style>{STYLE_PATH.read_text()}{STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>"
        + _paragraphs("story", verdict(rows))
        + _leads(rows)
        + _table(rows)
        + stage_section(rows)
        + (_pictures(drawn) if drawn else "")
        + "<h2>How it was done</h2>"
        + _paragraphs("soft", [*notes, *told, _seeds_drawn(drawn)])
        + "</main></body></html>\n"
    )


def _first_of_each(rows: Sequence[ReplayRow], views: Sequence[RunView]) -> Views:
    """Label -> its first view; labels as in the tables, whatever is drawn."""
    known = [*rows, *(view.row for view in views)]
    found: dict[str, RunView] = {}
    for label, view in zip(labels(known)[len(rows) :], views, strict=True):
        found.setdefault(label, view)
    return found


def _paragraphs(kind: str, texts: Sequence[str]) -> str:
    return "".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts if text)


def _seeds_drawn(views: Views) -> str:
    if not views:
        return ""
    seeds = ", ".join(f"{label} {view.row.seed}" for label, view in views.items())
    return f"Pictures show one seed of each policy: {seeds}. Tables and words are of all seeds."


def _leads(rows: Sequence[ReplayRow]) -> str:
    lines = "".join(
        f'<li class="{"yes" if sure else "no"}"><b>{"✓" if sure else "~"}</b>{escape(text)}</li>'
        for text, sure in leads_told(rows)
    )
    return f'<ul class="claims">{lines}</ul>' if lines else ""


def _table(rows: Sequence[ReplayRow]) -> str:
    """Means and intervals per policy, what the columns mean, and each seed on request."""
    policies = aggregate(rows)
    shown = [one for one in FIGURES if any(policy.figures[one.name] for policy in policies)]
    marks = leaders(shown, by_policy(rows))
    head = "".join(f"<th>{escape(one.title)}</th>" for one in shown)
    body = ""
    for policy in policies:
        cells = "".join(
            f"<td{' class=best' if marks.get(one.name) == policy.label else ''}>"
            f"{escape(cell(one, policy.figures[one.name]))}</td>"
            for one in shown
        )
        body += f"<tr><td>{escape(policy.label)}</td>{cells}</tr>"
    terms = "".join(f"<dt>{escape(one.title)}</dt><dd>{escape(one.meaning)}</dd>" for one in shown)
    several = any(len(policy.seeds) > 1 for policy in policies)
    told = "Times in ms of virtual time."
    told += " Mean over seeds ± its 95 % interval." if several else ""
    told += " Best in green" if marks else ""
    told += (", where by more than the seeds are apart." if several else ".") if marks else ""
    return (
        f'<h2>All figures</h2><p class="soft">{told}</p>'
        f'<div class="table"><table><tr><th>policy</th>{head}</tr>{body}</table></div>'
        f'<dl class="terms">{terms}</dl>{_seeds(rows)}'
    )


def _seeds(rows: Sequence[ReplayRow]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in SEED_COLUMNS)
    body = ""
    for row, label in zip(rows, labels(rows), strict=True):
        counts = (row.seed, row.completed, row.rejected, row.failed, row.retries, row.holds)
        cells = "".join(f"<td>{whole(count)}</td>" for count in counts)
        body += f"<tr><td>{escape(label)}</td>{cells}<td>{row.report_hash}</td></tr>"
    return (
        "<details><summary>Each seed, and the hash that an equal replay must have</summary>"
        f'<div class="table"><table><tr><th>policy</th>{head}</tr>{body}</table></div></details>'
    )


def _pictures(views: Views) -> str:
    return _curves(views) + _over_time(views) + _workers(views) + _hot(views) + _splits(views)


def _curves(views: Views) -> str:
    figures = ""
    for name, xlabel, of in CURVES:
        if not any(len(of(view)) for view in views.values()):
            continue
        alt = f"{name} curves. " + "; ".join(
            f"{label}: median {of(view)[len(of(view)) // 2]:,.0f} ms"
            for label, view in views.items()
            if len(of(view))
        )
        svg = curve_plot({label: of(view) for label, view in views.items()}, xlabel)
        figures += f"<figure>{picture(svg, alt)}<figcaption>{name}</figcaption></figure>"
    if not figures:
        return ""
    return (
        '<h2>How long requests took</h2><p class="soft">Share of completed requests within a '
        "time: further left is better; the axis is logarithmic.</p>"
        f'<div class="curves">{figures}</div>'
    )


def _over_time(views: Views) -> str:
    alt = "Hit rate over time. " + "; ".join(
        f"{label}: {percent(view.row.hit_rate_tokens)} in all" for label, view in views.items()
    )
    if not any(len(hit_rates(view.samples, 1)[1]) for view in views.values()):
        return ""
    return (
        '<h2>Hit rate over time</h2><p class="soft">Prompt tokens found in the caches of all '
        "workers, of those asked for in that stretch of time; lines as above.</p>"
        f'<div class="curves"><figure>{picture(hit_plot(views), alt)}</figure></div>'
    )


def _workers(views: Views) -> str:
    """A map of busy time and one of requests for each policy, on the same scales."""
    if not any(len(view.samples.time_ns) for view in views.values()):
        return ""
    until_s = max(view.row.simulated_s for view in views.values()) or 1.0
    there = {label: view.samples.running + view.samples.waiting for label, view in views.items()}
    most = max(1, *(int(load.max(initial=0)) for load in there.values()))
    articles = ""
    for label, view in views.items():
        row, samples = view.row, view.samples
        busy = worker_map(samples, samples.busy_share, 1.0, until_s)
        load = worker_map(samples, there[label], most, until_s, log=True)
        peak = int(there[label].max(initial=0))
        told = f"Busiest worker {_skew(row)}, at most {peak:,} requests on one."
        articles += (
            f"<article><h3>{escape(label)}</h3><p>{escape(told)}</p>"
            f"<figure>{picture(busy, f'Busy share of each worker over time, {label}')}</figure>"
            f"<figure>{picture(load, f'Requests on each worker over time, {label}. {told}')}"
            "</figure></article>"
        )
    return (
        '<h2>Load of each worker</h2><p class="soft">One line a worker. Above: share of time it '
        "was busy. Below: requests there, running or waiting, on a logarithmic scale.</p>"
        f'{_scales(most)}<div class="runs">{articles}</div>'
    )


def _skew(row: ReplayRow) -> str:
    skew = row.load_skew_busy
    return "never busy" if skew is None else f"{skew:.2f} times the mean"


def _scales(most: int) -> str:
    stops = ", ".join(busy_scale())
    scale = f'<i class="scale" style="background:linear-gradient(90deg, {stops})"></i>'
    return (
        f'<div class="legend"><span>idle {scale}busy</span>'
        f"<span>0 {scale}{most:,} requests</span></div>"
    )


def _hot(views: Views) -> str:
    if not any(view.hot for view in views.values()):
        return ""
    until_s = max(view.row.simulated_s for view in views.values()) or 1.0
    articles = ""
    for label, view in views.items():
        alt = f"Copies of hot prefixes over time, {label}: " + "; ".join(
            f"{prefix.blocks} blocks, {prefix.requests:,} requests, at most "
            f"{max(0, int(prefix.copies.max(initial=0)))} copies"
            for prefix in view.hot
        )
        svg = copies_plot(view.hot, view.samples, len(view.row.workers), until_s)
        articles += (
            f"<article><h3>{escape(label)}</h3><figure>{picture(svg, alt)}</figure></article>"
        )
    return (
        '<h2>Hot prefixes and their copies</h2><p class="soft">The prefixes that most requests '
        "began with, and how many workers held each.</p>"
        f'<div class="runs">{articles}</div>'
    )


def _splits(views: Views) -> str:
    times = {
        label: (split.router_ms / 1000, split.prefill_ms / 1000, split.decode_ms / 1000)
        for label, view in views.items()
        if (split := view.time) is not None
    }
    tokens = {
        label: (spent.cached / 1e6, spent.computed / 1e6, spent.recomputed / 1e6)
        for label, view in views.items()
        if (spent := view.tokens).cached + spent.computed
    }
    figures = _split(times, TIME_PARTS, "mean seconds of a completed request", tokens=False)
    figures += _split(tokens, TOKEN_PARTS, "million prompt tokens", tokens=True)
    return f'<h2>Where the time went</h2><div class="curves">{figures}</div>' if figures else ""


def _split(
    parts: Mapping[str, tuple[float, ...]], names: Sequence[str], xlabel: str, tokens: bool
) -> str:
    if not parts:
        return ""
    alt = f"{xlabel.capitalize()}. " + "; ".join(
        f"{label}: " + ", ".join(f"{n} {v:.2f}" for n, v in zip(names, values, strict=True))
        for label, values in parts.items()
    )
    return f"<figure>{picture(split_plot(parts, names, xlabel, tokens), alt)}</figure>"

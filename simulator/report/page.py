"""Replays as one self-contained HTML page: the answer in words, then figures, then pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from simulator.report.console import cell, leaders, stage_section
from simulator.report.figures import (
    FIGURES,
    Figure,
    Groups,
    Lead,
    aggregate,
    by_policy,
    figure,
    labels,
    lead,
    means,
    paired,
    percent,
    whole,
)
from simulator.report.live_page import STYLE_PATH, picture
from simulator.report.plots import (
    busy_scale,
    copies_plot,
    curve_plot,
    hit_plot,
    split_plot,
    worker_map,
)
from simulator.report.row import ReplayRow
from simulator.report.view import Floats, RunView, hit_rates

# By these a policy is chosen: by the first of them that has a leader.
CHOOSING = ("goodput.share", "ttft_ms.p90", "ttft_ms.mean", "e2e_ms.mean", "hit_rate_tokens")
HEADLINES = (
    *("goodput.share", "ttft_ms.p90", "ttft_ms.mean", "tpot_ms.mean", "e2e_ms.mean"),
    *("output_tokens_per_s", "hit_rate_tokens", "load_skew_busy"),
)
NAMES = {
    "goodput.share": "requests within the limits",
    "ttft_ms.mean": "mean TTFT",
    "tpot_ms.mean": "mean TPOT",
    "e2e_ms.mean": "mean time to the last token",
    "hit_rate_tokens": "hit rate",
    "output_tokens_per_s": "output",
    "load_skew_busy": "busiest worker over the mean",
}
ONE_SEED = "One seed only: what chance does to these figures is not known; replay several seeds."
SMALL = 0.01  # of a figure: told as a cost only where the seeds agree on it


def verdict(rows: Sequence[ReplayRow]) -> list[str]:
    """Sentences for the top of a report, the answer first."""
    groups = by_policy(rows)
    if not rows:
        return ["Nothing was replayed."]
    if not any(row.completed for row in rows):
        return ["No request was completed."]
    if len(groups) == 1:
        return [_alone(next(iter(groups)), groups), *_losses(groups)]
    chosen = _chosen(groups)
    if chosen is None:
        return ["The policies cannot be told apart by any figure.", *_losses(groups)]
    unsure = [ONE_SEED] if chosen.sure is None else []
    costs = _costs(chosen.winner, groups)
    return [_headline(chosen, rows), *costs, *_losses(groups), *unsure]


def leads_told(rows: Sequence[ReplayRow]) -> list[tuple[str, bool]]:
    """For each headline figure who leads by how much, and whether that is beyond chance."""
    groups = by_policy(rows)
    leads = [found for name in HEADLINES if (found := lead(figure(name), groups))]
    return [(_lead_line(found), bool(found.sure)) for found in leads]


def _chosen(groups: Groups) -> Lead | None:
    """The first figure with a leader beyond chance; else the first with any."""
    leads = [found for name in CHOOSING if (found := lead(figure(name), groups))]
    return next((found for found in leads if found.sure), leads[0] if leads else None)


def _headline(chosen: Lead, rows: Sequence[ReplayRow]) -> str:
    one = chosen.figure
    limits = rows[0].goodput
    by = f"by {_name(one)}"
    if one.name == "goodput.share":
        by += f" (TTFT {limits.ttft_ms:g} ms, TPOT {limits.tpot_ms:g} ms)"
    return (
        f"{chosen.winner} is best {by}: {one.said(chosen.value)} against "
        f"{one.said(chosen.other)} with {chosen.second}{_surely(chosen)}."
    )


def _costs(winner: str, groups: Groups) -> list[str]:
    """By which figures another policy is better than the winner, and by how much."""
    costs = []
    for name in HEADLINES:
        one = figure(name)
        ranked = means(one, groups)
        leader = next(iter(ranked), None)
        if leader is None or winner not in ranked or ranked[leader] == ranked[winner]:
            continue
        difference = paired(one, groups[winner], groups[leader])
        cost = Lead(one, leader, ranked[leader], winner, ranked[winner], difference)
        small = abs(cost.value - cost.other) < SMALL * max(abs(cost.value), abs(cost.other))
        if cost.sure or (cost.sure is None and not small):
            told = f"{_name(one)} {one.said(cost.other)} against {one.said(cost.value)}"
            costs.append(f"{told} with {leader}")
    if not costs:
        return [f"By none of the other figures is {winner} clearly worse than another."]
    return [f"What {winner} costs: {'; '.join(costs)}."]


def _lead_line(found: Lead) -> str:
    one = found.figure
    return (
        f"{_upper(_name(one))}: {found.winner} {one.said(found.value)}, then {found.second} "
        f"{one.said(found.other)}{_apart(found)}{_surely(found)}."
    )


def _apart(found: Lead) -> str:
    """How far apart two values are, in percent of the second one; shares say it themselves."""
    if found.figure.show is percent or not found.other:
        return ""
    change = found.value / found.other - 1
    return f" ({change:+.0%})" if abs(change) >= 0.005 else " (under 1 %)"


def _surely(found: Lead) -> str:
    if found.sure is None:
        return ""
    if found.spreads is None:
        return ", the same lead with every seed"
    if found.sure:
        return f", {found.spreads:.1f} times what the seeds are apart"
    return ", which is within what the seeds are apart: chance may turn it around"


def _losses(groups: Groups) -> list[str]:
    """Policies whose times leave out requests that got no answer."""
    told = []
    for label, rows in groups.items():
        asked = sum(row.requests for row in rows)
        unanswered = sum(row.rejected + row.failed for row in rows)
        if unanswered:
            told.append(f"{label} {percent(unanswered / asked)}")
    return [f"Left without an answer: {', '.join(told)}; times are of the others."] if told else []


def _alone(label: str, groups: Groups) -> str:
    told = []
    for name in HEADLINES:
        one = figure(name)
        if label in (found := means(one, groups)):
            told.append(f"{_name(one)} {one.said(found[label])}")
    return f"{label} was replayed alone: {', '.join(told)}."


def _name(one: Figure) -> str:
    return NAMES.get(one.name, one.title)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


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

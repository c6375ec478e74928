"""Shows replays as an HTML page: first the answer in words, then figures, then pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan

from simulator.report.figures import (
    FIGURES,
    GOOD,
    TTFT,
    Figure,
    Groups,
    Lead,
    aggregate,
    beside_table,
    by_policy,
    figure,
    figure_table,
    labels,
    lead,
    leaders,
    marks,
    meaning_of,
    means,
    ms,
    paired,
    percent,
    whole,
)
from simulator.report.page import NOISE, Card, Claim, Key, Page, Picture, Section, Table
from simulator.report.plots import (
    Line,
    busy_scale,
    copies_plot,
    curve_plot,
    line_plot,
    split_plot,
    worker_map,
)
from simulator.report.row import Ladders, ReplayRow, StageFigure, StageRow, ladders, rates
from simulator.report.view import Floats, RunView, hit_rates

# The policy is chosen by the first of these figures that has a leader.
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
MORE = "--resamples N replays N draws of a trace, --seed N one more seed"
SMALL = 0.01  # share of a figure: smaller costs are named only if the seeds agree


def verdict(rows: Sequence[ReplayRow]) -> list[str]:
    """Return the sentences for the top of a report, the answer first."""
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
    unsure = [ONE_SEED] if chosen.is_significant is None else []
    costs = _costs(chosen.winner, groups)
    return [_headline(chosen, rows), *costs, *_losses(groups), *unsure]


def lead_claims(rows: Sequence[ReplayRow]) -> list[Claim]:
    """Return, for each headline figure, a claim on which policy leads, by how much, and whether by
    more than noise.
    """
    groups = by_policy(rows)
    leads = [found for name in HEADLINES if (found := lead(figure(name), groups))]
    return [
        Claim(_lead_line(found), bool(found.is_significant), _SIGNS[found.is_significant])
        for found in leads
    ]


_SIGNS = {True: "✓", False: NOISE, None: "·"}


def _chosen(groups: Groups) -> Lead | None:
    """Return the lead by the first figure that has a leader beyond noise, else by the first with
    any leader, else None.
    """
    leads = [found for name in CHOOSING if (found := lead(figure(name), groups))]
    return next((found for found in leads if found.is_significant), leads[0] if leads else None)


def _headline(chosen: Lead, rows: Sequence[ReplayRow]) -> str:
    one = chosen.figure
    limits = rows[0].goodput
    by = f"by {_name(one)}"
    if one.name == "goodput.share":
        by += f" (TTFT {limits.ttft_ms:g} ms, TPOT {limits.tpot_ms:g} ms)"
    noise = ", within noise" if chosen.is_significant is False else ""
    return (
        f"{chosen.winner} is best {by}: {one.with_unit(chosen.value)} against "
        f"{one.with_unit(chosen.other)} with {chosen.second}{noise}{_surely(chosen)}."
    )


def _costs(winner: str, groups: Groups) -> list[str]:
    """Return sentences on the figures by which another policy is better than the winner."""
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
        if cost.is_significant or (cost.is_significant is None and not small):
            told = f"{_name(one)} {one.with_unit(cost.other)} against {one.with_unit(cost.value)}"
            costs.append(f"{told} with {leader}")
    if not costs:
        return [f"By none of the other figures is {winner} clearly worse than another."]
    return [f"What {winner} costs: {'; '.join(costs)}."]


def _lead_line(found: Lead) -> str:
    one = found.figure
    name = _name(one)
    return (
        f"{name[:1].upper()}{name[1:]}: {found.winner} {one.with_unit(found.value)}, "
        f"then {found.second} {one.with_unit(found.other)}{_apart(found)}{_surely(found)}."
    )


def _apart(found: Lead) -> str:
    """Return the difference between the best value and the next one as a text in percent of the
    next one; "" for figures that are shares.
    """
    if found.figure.show is percent or not found.other:
        return ""
    change = found.value / found.other - 1
    return f" ({change:+.0%})" if abs(change) >= 0.005 else " (under 1 %)"


def _surely(found: Lead) -> str:
    if not found.is_significant:
        return ""
    if found.spreads is None:
        return ", the same lead with every seed"
    return f", {found.spreads:.1f} times what the seeds are apart"


def _losses(groups: Groups) -> list[str]:
    """Return a line on the policies that left requests without an answer, because their times do
    not include these requests.
    """
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
            told.append(f"{_name(one)} {one.with_unit(found[label])}")
    return f"{label} was replayed alone: {', '.join(told)}."


def _name(one: Figure) -> str:
    return NAMES.get(one.name, one.title)


# Folded on the page, so that the other columns fit a window of 1,280 pixels.
TAILS = (
    *("tpot_ms.p90", "tpot_ms.p99", "e2e_ms.p99", "continuations.ttft_ms.p99"),
    *("tasks.time_ms.p50", "tasks.time_ms.p90", "tasks.time_ms.p99"),
)
SEED_COLUMNS = ("policy", "seed", "completed", "rejected", "lost", "retries", "holds", "hash")
CURVES: tuple[tuple[str, str, Callable[[RunView], Floats]], ...] = (
    ("TTFT", "time to first token, s", lambda view: view.ttft_ms),
    ("TPOT", "time per output token, s", lambda view: view.tpot_ms),
    ("End to end", "time to the last token, s", lambda view: view.e2e_ms),
)
TIME_PARTS = ("at the router", "queue and prefill", "decode")
TOKEN_PARTS = ("from cache", "computed", "computed again")
WINDOWS = 40  # stretches of time of a hit rate
STAGE_FIGURES = (
    StageFigure("TTFT p90, ms", lambda stage: stage.ttft_ms.p90, ms),
    StageFigure("output tokens/s", lambda stage: stage.output_tokens_per_s, whole),
    StageFigure("hits", lambda stage: stage.hit_rate_tokens, percent),
)

Views = Mapping[str, RunView]


def render_page(
    rows: Sequence[ReplayRow],
    views: Sequence[RunView],
    notes: Sequence[str] = (),
    title: str = "Replay",
) -> str:
    """Return the whole HTML page on replays. `rows` has all seeds of all policies, for the words
    and the tables. `views` are drawn; of several views of one policy only the first. `notes` say
    how the replays were done, a paragraph each.
    """
    drawn = _first_of_each(rows, views)
    told = dict.fromkeys(note for view in drawn.values() for note in view.notes)
    sections = [_figures(rows), _stages(rows)]
    if drawn:
        sections += [_curves(drawn), _over_time(drawn), _workers(drawn), _hot(drawn)]
        sections.append(_splits(drawn))
    all_notes = [*notes, *told, _seeds_drawn(drawn)]
    shown = [section for section in sections if section]
    claims = lead_claims(rows)
    cells = [cell for part in shown for table in part.tables for cell in table.cells]
    legend = marks([*cells, *(claim.sign for claim in claims)], MORE)
    return Page(title, verdict(rows), claims, shown, all_notes, marks=legend).html()


def _first_of_each(rows: Sequence[ReplayRow], views: Sequence[RunView]) -> Views:
    """Return the first view of each policy by its label; the labels are the same as in
    the tables.
    """
    known = [*rows, *(view.row for view in views)]
    found: dict[str, RunView] = {}
    for label, view in zip(labels(known)[len(rows) :], views, strict=True):
        found.setdefault(label, view)
    return found


def _seeds_drawn(views: Views) -> str:
    if not views:
        return ""
    seeds = ", ".join(f"{label} {view.row.seed}" for label, view in views.items())
    return f"Pictures show one seed of each policy: {seeds}. Tables and words are of all seeds."


def replay_table(
    rows: Sequence[ReplayRow], figures: Sequence[Figure] = FIGURES, summary: str = ""
) -> tuple[Table, list[Figure]]:
    """Return the table of means and intervals per policy, with the best marked, and the list of
    figures that were measured.
    """
    policies = aggregate(rows)
    shown = [one for one in figures if any(policy.figures[one.name] for policy in policies)]
    marks = leaders(shown, by_policy(rows))
    found = {policy.label: policy.figures for policy in policies}
    return figure_table(found, shown, marks, summary=summary), shown


def versus_table(rows: Sequence[ReplayRow]) -> tuple[str, Table, str] | None:
    """Return the heading, the table, and a sentence on wanted seeds, for a comparison of each
    policy with the first one. Policies are compared seed by seed. Returns None if there is nothing
    to compare, or only one seed.
    """
    policies = [one for one in aggregate(rows) if one.versus is not None]
    found = {one.label: (one.ratios[TTFT], one.differences[GOOD]) for one in policies}
    return beside_table(policies[0].versus or "", found) if policies else None


def stage_tables(rows: Sequence[ReplayRow]) -> list[tuple[str, Table]]:
    """Return one table for each figure of a load ladder (stages of rising load), with a column for
    each rate. Returns [] if no workload had stages.
    """
    groups = _stage_groups(rows)
    offered = rates(groups)
    if not offered:
        return []
    head = ("policy", *(f"{rate:g}/s" for rate in offered))
    return [
        (one.name, Table(head, [
            (label, *map(one.show, values)) for label, values in ladders(groups, one.of).items()
        ]))
        for one in STAGE_FIGURES
    ]  # fmt: skip


def _stage_groups(rows: Sequence[ReplayRow]) -> Mapping[str, list[tuple[StageRow, ...]]]:
    return {label: [row.stages for row in own] for label, own in by_policy(rows).items()}


def _figures(rows: Sequence[ReplayRow]) -> Section:
    """Return the section with means and intervals per policy, the legend, and a folded part with
    the rows of each seed.
    """
    table, shown = replay_table(rows, [one for one in FIGURES if one.name not in TAILS])
    tails, folded = replay_table(
        rows, [one for one in FIGURES if one.name in TAILS], "The slow ends of the other times"
    )
    several = len({row.seed for row in rows}) > 1
    told = "Times in ms of virtual time."
    told += " Mean over seeds ± its 95 % interval." if several else ""
    if table.best or tails.best:
        told += " Best in green" + (", where by more than the seeds are apart." if several else ".")
    beside = versus_table(rows)
    lines = [
        (
            label,
            *map(whole, (row.seed, row.completed, row.rejected)),
            *map(whole, (row.failed, row.retries, row.holds)),
            row.report_hash,
        )
        for row, label in zip(rows, labels(rows), strict=True)
    ]
    summary = "Each seed, and the hash that an equal replay must have"
    tables = [table]
    if beside is not None:
        title, compared, wide = beside
        told += f" Below: {title}. {wide}"
        tables.append(compared)
    return Section(
        "All figures",
        told.rstrip(" .") + ".",
        tables=(*tables, tails, Table(SEED_COLUMNS, lines, summary=summary)),
        terms=[(one.title, meaning_of(one, rows)) for one in FIGURES if one in (*shown, *folded)],
    )


def _stages(rows: Sequence[ReplayRow]) -> Section:
    """Return the section with TTFT and output against the rate; it is empty without stages."""
    groups = _stage_groups(rows)
    offered = rates(groups)
    pictures = []
    for one, log in zip(STAGE_FIGURES[:2], ("y", ""), strict=True):
        ladder = ladders(groups, one.of)
        if not offered:
            break
        alt = f"{one.name} against the rate. " + "; ".join(
            f"{label}: {one.show(values[0])} at {offered[0]:g}/s, {one.show(values[-1])} at "
            f"{offered[-1]:g}/s"
            for label, values in ladder.items()
        )
        pictures.append(Picture(ladder_plot(offered, ladder, one.name, log == "y"), alt, one.name))
    told = "Each stage of the workload by its rate: requests that arrived in it, output until its "
    return Section(
        "As the load rises", told + "last answer; means of all seeds.", pictures=pictures
    )


def ladder_plot(offered: Sequence[float], ladder: Ladders, ylabel: str, log: bool) -> str:
    """Draw a figure against the rates of a load ladder (stages of rising load), one line for each
    policy. With `log`, the figure's axis is logarithmic.
    """
    lines: dict[str, Line] = {
        label: (offered, [nan if value is None else value for value in values])
        for label, values in ladder.items()
    }
    limits = None if log else (0, None)
    return line_plot(
        lines, "requests per second", ylabel, log="y" if log else "", ylim=limits, points=True
    )


def _curves(views: Views) -> Section:
    pictures = []
    for name, xlabel, of in CURVES:
        if not any(len(of(view)) for view in views.values()):
            continue
        alt = f"{name} curves. " + "; ".join(
            f"{label}: median {of(view)[len(of(view)) // 2]:,.0f} ms"
            for label, view in views.items()
            if len(of(view))
        )
        svg = curve_plot({label: of(view) for label, view in views.items()}, xlabel)
        pictures.append(Picture(svg, alt, name))
    told = "Share of completed requests within a time: further left is better; the axis is "
    return Section("How long requests took", told + "logarithmic.", pictures=pictures)


def _over_time(views: Views) -> Section:
    found = {label: hit_rates(view.samples, WINDOWS) for label, view in views.items()}
    if not any(len(rates) for _, rates in found.values()):
        return Section("")
    alt = "Hit rate over time. " + "; ".join(
        f"{label}: {percent(view.row.hit_rate_tokens)} in all" for label, view in views.items()
    )
    lines: dict[str, Line] = {label: (at_s, 100 * rates) for label, (at_s, rates) in found.items()}
    limits = (0.0, _until_s(views))
    svg = line_plot(lines, "time, s", "% of prompt tokens", xlim=limits, ylim=(0, 100))
    return Section(
        "Hit rate over time",
        "Prompt tokens found in the caches of all workers, of those asked for in that stretch of "
        "time.",
        pictures=[Picture(svg, alt)],
    )


def _workers(views: Views) -> Section:
    """Return the section with two maps per policy, one of busy time and one of requests, on the
    same scales.
    """
    title = "Load of each worker"
    if not any(len(view.samples.time_ns) for view in views.values()):
        return Section(title)
    until_s = _until_s(views)
    there = {label: view.samples.running + view.samples.waiting for label, view in views.items()}
    most = max(1, *(int(load.max(initial=0)) for load in there.values()))
    cards = []
    for label, view in views.items():
        busy = worker_map(view.samples, view.samples.busy_share, 1.0, until_s)
        load = worker_map(view.samples, there[label], most, until_s, log=True)
        skew = view.row.load_skew_busy
        times = "never busy" if skew is None else f"{skew:.2f} times the mean"
        peak = int(there[label].max(initial=0))
        told = f"Busiest worker {times}, at most {peak:,} requests on one."
        pictures = (
            Picture(busy, f"Busy share of each worker over time, {label}"),
            Picture(load, f"Requests on each worker over time, {label}. {told}"),
        )
        cards.append(Card(label, told, pictures))
    return Section(
        title,
        "One line a worker. Above: share of time it was busy. Below: requests there, running or "
        "waiting, on a logarithmic scale.",
        Key((), (("idle", "busy"), ("0", f"{most:,} requests")), busy_scale()),
        cards,
    )


def _hot(views: Views) -> Section:
    title = "Hot prefixes and their copies"
    if not any(view.hot for view in views.values()):
        return Section(title)
    cards = []
    for label, view in views.items():
        alt = f"Copies of hot prefixes over time, {label}: " + "; ".join(
            f"{prefix.blocks} blocks, {prefix.requests:,} requests, at most "
            f"{max(0, int(prefix.copies.max(initial=0)))} copies"
            for prefix in view.hot
        )
        svg = copies_plot(view.hot, view.samples, len(view.row.workers), _until_s(views))
        cards.append(Card(label, "", [Picture(svg, alt)]))
    told = "The prefixes that most requests began with, and how many workers held each."
    return Section(title, told, cards=cards)


def _until_s(views: Views) -> float:
    return max(view.row.simulated_s for view in views.values()) or 1.0


def _splits(views: Views) -> Section:
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
    pictures = [
        _split(times, TIME_PARTS, "mean seconds of a completed request", tokens=False),
        _split(tokens, TOKEN_PARTS, "million prompt tokens", tokens=True),
    ]
    return Section("Where the time went", pictures=[one for one in pictures if one])


def _split(
    parts: Mapping[str, tuple[float, ...]], names: Sequence[str], xlabel: str, tokens: bool
) -> Picture | None:
    if not parts:
        return None
    alt = f"{xlabel.capitalize()}. " + "; ".join(
        f"{label}: " + ", ".join(f"{n} {v:.2f}" for n, v in zip(names, values, strict=True))
        for label, values in parts.items()
    )
    return Picture(split_plot(parts, names, xlabel, tokens), alt)

"""The HTML page of live runs: claims, plots and figures of each workload, and the method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from simulator.live.outcome import ResultRow, hot_share
from simulator.live.stack import RunResult
from simulator.report.figures import Figure, live_table, percent, seconds
from simulator.report.page import Card, Claim, Key, Opening, Page, Picture, Section
from simulator.report.plots import (
    WORKER_COLOURS,
    Line,
    bars_plot,
    busy_scale,
    curve_plot,
    line_plot,
    share_plot,
    worker_map,
)
from simulator.report.view import CURVE_POINTS, Floats, hit_rates

TITLES = {
    "shared_prompt": "One popular prompt",
    "shared_prompts": "Popular prompts",
    "conversation": "Conversations",
    "agents": "Agents in tight memory",
    "live": "Live: one popular prompt over real HTTP",
}
NAMELESS = (
    "This endpoint does not name its workers (its replies bear no x-warmroute-worker), so there "
    "is nothing to show of each."
)
# Timed workers run on their model's time, all other programs on the wall clock.
Clock = Literal["model time", "wall time"]
OURS = ("hybrid", "warmset")  # rows that stand out
HOT, CURE = "kv_prefix", "hybrid"  # of the picture that the page opens with
SHARE_BINS = 24
WAIT_BINS = 20
WINDOWS = 40  # stretches of time of a hit rate


def render_page(
    runs: Sequence[RunResult],
    story: Sequence[str],
    claims: Sequence[Claim],
    notes: Sequence[str],
    title: str = "The hot spot, its cure, and caches that last",
    clock: Clock = "model time",
    more: Sequence[Section] = (),
    marks: str = "",
) -> str:
    """Return the whole HTML page on live runs; the sections of `more` follow those of the runs."""
    sections, measured = [], dict[Figure, None]()
    for name in dict.fromkeys(run.row.workload for run in runs):
        section, figures = _workload(name, [run for run in runs if run.row.workload == name])
        sections.append(section)
        measured |= dict.fromkeys(figures)
    sections += more
    terms = [(one.title, one.meaning) for one in measured]
    sections.append(
        Section("What the columns mean", f"Times in milliseconds of {clock}.", terms=terms)
    )
    return Page(title, story, claims, sections, notes, hot_spot(runs), marks).html()


def hot_spot(runs: Sequence[RunResult]) -> Opening | None:
    """Return the opening of the page, which shows the requests of each worker under the policies
    `HOT` and `CURE`. It shows the first workload that has both; None if there is none.
    """
    found = {(run.row.workload, run.row.policy): run.row for run in runs if run.workers}
    pairs = ((found[name, HOT], found.get((name, CURE))) for name, policy in found if policy == HOT)
    hot, cured = next(((hot, cured) for hot, cured in pairs if cured), (None, None))
    if hot is None or cured is None:
        return None
    top = max(*hot.requests_per_worker, *cured.requests_per_worker)
    cards = []
    for row, rule in (
        (hot, "Goes where the cache is warmest."),
        (cured, "Weighs load against cache."),
    ):
        svg = bars_plot(row.requests_per_worker, top, row.policy, "requests sent to it")
        counts = ", ".join(map(str, row.requests_per_worker))
        picture = Picture(svg, f"Requests sent to each worker, {row.policy}: {counts}")
        cards.append(Card(row.policy, rule, [picture]))
    sent = sorted({min(cured.requests_per_worker), max(cured.requests_per_worker)})
    caption = (
        f"{hot.requests:,} requests for one popular prompt: {hot.policy} sends "
        f"{hot_share(hot):.0%} of them to one of {len(hot.workers)} workers, and the slowest 1 % "
        f"wait {seconds(hot.ttft_ms.p99)} for their first token; {cured.policy} sends "
        f"{' to '.join(map(str, sent))} to each worker, and the slowest 1 % wait "
        f"{seconds(cured.ttft_ms.p99)}."
    )
    return Opening(cards, caption)


def _workload(name: str, runs: Sequence[RunResult]) -> tuple[Section, list[Figure]]:
    table, figures = live_table({run.row.policy: run.row for run in runs}, OURS)
    text, key = _key(runs[0])
    until_s = max(run.row.duration_s for run in runs)
    pictures = [_waiting(runs), *_over_time(runs)]
    cards = [_card(run, until_s) for run in runs]
    return Section(TITLES.get(name, name), text, key, cards, pictures, [table]), figures


def _key(run: RunResult) -> tuple[str, Key | None]:
    """Return the legend of the plots that have a line for each worker, if there are any."""
    if not run.workers:
        return NAMELESS, None
    sampled = bool(len(run.samples.time_ns))
    told = "Which worker got the requests that arrived then."
    if sampled:
        told = f"Above: {told[0].lower()}{told[1:]} Below: how busy each of them was."
    colours = [WORKER_COLOURS[n % len(WORKER_COLOURS)] for n in range(len(run.workers))]
    swatches = list(zip(run.workers, colours, strict=True))
    return told, Key(swatches, (("idle", "busy"),) if sampled else (), busy_scale())


def _card(run: RunResult, until_s: float) -> Card:
    row, pictures = run.row, []
    if run.workers:
        counted = zip(row.workers, row.requests_per_worker, strict=True)
        counts = ", ".join(f"{name} {count}" for name, count in counted)
        alt = f"Share of requests over time, {row.policy}: {counts}"
        pictures.append(Picture(share_plot(*worker_counts(run)), alt))
    if len(run.samples.time_ns):
        shares = zip(row.workers, row.busy_share_per_worker, strict=False)
        busy = ", ".join(f"{name} {share:.0%}" for name, share in shares)
        svg = worker_map(run.samples, run.samples.busy_share, 1.0, until_s)
        pictures.append(Picture(svg, f"Busy workers over time, {row.policy}: {busy}"))
    return Card(row.policy, _caption(row), pictures)


def _caption(row: ResultRow) -> str:
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


def worker_counts(run: RunResult) -> tuple[np.typing.NDArray[np.int64], Floats]:
    """Return the number of requests by worker and time of arrival, int[workers, bins], and the
    edges of the time bins in model seconds.
    """
    sent = [(o.scheduled_s * run.row.speed, o.worker) for o in run.outcomes if o.worker is not None]
    edges = np.linspace(0.0, max([1.0, *(at_s for at_s, _ in sent)]), SHARE_BINS + 1)
    counts = [
        np.histogram([at_s for at_s, worker in sent if worker == name], edges)[0]
        for name in run.workers
    ]
    return np.array(counts, np.int64), edges


def _waiting(runs: Sequence[RunResult]) -> Picture:
    alt = "Curves of the time to first token: " + "; ".join(
        f"{run.row.policy} median {run.row.ttft_ms.p50} ms, p99 {run.row.ttft_ms.p99} ms"
        for run in runs
    )
    curves = {run.row.policy: _quantiles(_waits(run)[1]) for run in runs}
    return Picture(
        curve_plot(curves, "time to first token, s"),
        alt,
        "Share of requests whose first token came within a time (further left is better; the axis "
        "is logarithmic).",
    )


def _quantiles(values: Floats) -> Floats:
    found: Floats = (
        np.quantile(values, np.linspace(0.0, 1.0, CURVE_POINTS)) if len(values) else values
    )
    return found


def _waits(run: RunResult) -> tuple[Floats, Floats]:
    """Return two arrays over the requests that got a first token: arrivals in model seconds, and
    times to first token in ms.
    """
    told = [(o.scheduled_s, o.ttft_ms) for o in run.outcomes if o.ttft_ms is not None]
    at_s, wait_ms = np.array(told, np.float64).reshape(-1, 2).T * run.row.speed
    return at_s, wait_ms


def waits_over_time(run: RunResult, until_s: float) -> tuple[Floats, Floats]:
    """Return the middles of `WAIT_BINS` bins of arrivals in model seconds, and the mean TTFT of
    each bin.

    The mean of a bin without an answered request is NaN.
    """
    at_s, wait_ms = _waits(run)
    edges = np.linspace(0.0, until_s, WAIT_BINS + 1)
    counts = np.histogram(at_s, edges)[0]
    sums = np.histogram(at_s, edges, weights=wait_ms / 1000)[0]
    means = np.divide(sums, counts, out=np.full(WAIT_BINS, np.nan), where=counts > 0)
    return (edges[:-1] + edges[1:]) / 2, means


def _over_time(runs: Sequence[RunResult]) -> Iterable[Picture]:
    """Return the plots of waits and hits over time, for workloads that have sessions with turns."""
    if all(outcome.turn is None for run in runs for outcome in run.outcomes):
        return
    # A closed loop's last arrival depends on the answers; all share the time of the longest.
    until_s = max(o.scheduled_s * run.row.speed for run in runs for o in run.outcomes)
    waits: dict[str, Line] = {run.row.policy: waits_over_time(run, until_s) for run in runs}
    means = "; ".join(
        f"{run.row.policy} first turns {seconds(run.row.new_ttft_ms.mean)}, later turns "
        f"{seconds(run.row.continuation_ttft_ms.mean)}"
        for run in runs
    )
    yield Picture(
        line_plot(waits, "arrival, s", "mean time to first token, s", log="y"),
        f"Mean time to first token over time; in all: {means}",
        "Mean time to first token of the turns that arrived then (lower is better; the axis is "
        "logarithmic).",
    )
    if any(len(run.samples.time_ns) for run in runs):
        hits: dict[str, Line] = {}
        for run in runs:
            times, rates = hit_rates(run.samples, WINDOWS)
            hits[run.row.policy] = (times, 100 * rates)
        shares = "; ".join(f"{r.row.policy} {percent(r.row.hit_rate_tokens)}" for r in runs)
        yield Picture(
            line_plot(hits, "time, s", "% of prompt tokens cached", ylim=(0, 100)),
            f"Share of prompt tokens found in caches over time; in all: {shares}",
            "Share of prompt tokens that workers found in their caches.",
        )

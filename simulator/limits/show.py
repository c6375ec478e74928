"""Prints hit-rate rows and bounds in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.limits.bounds import Bounds
from simulator.limits.hits import HitRow
from simulator.limits.losses import NAMES
from simulator.limits.report import BoundReport, Distance

NOTHING = "-"
METRICS = ("mean", "p50", "p90", "p95", "p99", "max")


def hits_table(rows: Sequence[HitRow]) -> Table:
    """Return a table with one line for each rule."""
    table = _table(
        "rule", "caches", "tokens each", "hit rate, tokens", "blocks", "per request", "skew"
    )
    for row in rows:
        size = "no limit" if row.kv_tokens is None else f"{row.kv_tokens:,}"
        rates = (row.hit_rate_tokens, row.hit_rate_blocks, row.hit_rate_requests)
        cells = [f"{rate:.4f}" for rate in rates]
        table.add_row(row.rule, str(row.workers), size, *cells, f"{row.load_skew:.2f}")
    return table


def bound_tables(report: BoundReport) -> RenderableType:
    """Return the tables of bounds, of the best achieved, of the policies and their losses, and the
    legend.
    """
    bounds = report.bounds
    heading = Text(f"{report.source}: {bounds.requests} requests")
    parts: list[RenderableType] = [heading, Text(), _bounds_table(bounds), Text()]
    parts += [_achieved_table(report), Text(), _gaps_table(report.distances), Text()]
    parts += [_hits_lost_table(report.distances), Text()]
    if any(one.losses for one in report.distances):
        parts += [_losses_table(report.distances), Text()]
    parts += [Text(line, style="dim") for line in LEGEND]
    parts += [Text(f"Note: {note}") for note in report.notes]
    return Group(*parts)


LEGEND = (
    "No policy is below the bounds; the true optimum lies between them and the best achieved.",
    "gap: 0 % at the bound, 100 % where round robin is. regret: above the best achieved.",
    "routing: hits lost by sending requests away from what they share; eviction: by forgetting it.",
    "losses add up, effect after effect switched off, from the policy's time to the bound.",
)


def _bounds_table(bounds: Bounds) -> Table:
    table = _table("no policy is better than", *METRICS, "decided by (mean)")
    for name, values in (
        ("time to first token, ms", bounds.ttft_ms),
        ("whole answer, ms", bounds.e2e_ms),
    ):
        cells = [f"{values[metric].value:,.1f}" for metric in METRICS]
        table.add_row(name, *cells, values["mean"].source)
    span = bounds.makespan_s
    table.add_row("whole run, s", f"{span.value:,.1f}", *[""] * 5, span.source)
    good = bounds.goodput_share
    table.add_row("good requests, at most", f"{good.value:.1%}", *[""] * 5, good.source)
    hit = bounds.hit_rate_tokens
    table.add_row("hit rate, at most", f"{hit.value:.4f}", *[""] * 5, hit.source)
    return table


def _achieved_table(report: BoundReport) -> Table:
    table = _table("achieved", "TTFT mean, ms", "answer mean, ms")
    for one in report.achieved:
        table.add_row(one.name, f"{one.ttft_ms:,.1f}", f"{one.e2e_ms:,.1f}")
    return table


def _gaps_table(distances: Sequence[Distance]) -> Table:
    table = _table("policy", "TTFT mean, ms", "gap", "regret", "answer mean, ms", "gap", "regret")
    for one in distances:
        table.add_row(
            one.policy,
            _number(one.ttft_ms),
            _percent(one.gap_ttft_percent),
            _percent(one.regret_ttft_percent),
            _number(one.e2e_ms),
            _percent(one.gap_e2e_percent),
            _percent(one.regret_e2e_percent),
        )
    return table


def _hits_lost_table(distances: Sequence[Distance]) -> Table:
    table = _table(
        "hit rate, tokens", "ceiling", "fleet's memory", "routing", "eviction", "measured"
    )
    for one in distances:
        hits = one.hits
        table.add_row(
            one.policy,
            f"{hits.ceiling:.4f}",
            f"{hits.union:.4f}",
            f"{-hits.routing:+.4f}",
            f"{-hits.eviction:+.4f}",
            f"{hits.measured:.4f}",
        )
    return table


def _losses_table(distances: Sequence[Distance]) -> Table:
    table = _table("TTFT lost to, ms", *NAMES)
    for one in distances:
        lost = {loss.name: loss.ttft_ms for loss in one.losses}
        table.add_row(one.policy, *[_number(lost.get(name)) for name in NAMES])
    return table


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.1f} %"


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    return table

"""What a dashboard is made of, and the queries that most panels are made of.

Rates are over `$__rate_interval`, which Grafana fits to the scrape interval and the zoom. With
hundreds of workers a panel shows sums, quantiles or the `$top` highest of them, never all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "state-timeline", "heatmap", "table"]
ROUTER = 'instance="$router"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are (PromQL, legend).

    `names`: what a label in the legend can be, where each value has a colour of its own.
    `alert`: the alert whose runbook entry says what to do about what is seen here.
    """

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8  # of 24 columns
    kind: Kind = "timeseries"
    names: tuple[str, ...] = ()
    stacked: bool = False
    maximum: float | None = None
    alert: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file. `variables` come after the data source's."""

    name: str
    description: str
    variables: tuple[dict[str, Any], ...]
    rows: tuple[Row, ...]


def selected(metric: str, matchers: str = "", of: str = ROUTER) -> str:
    """The metric's series of the chosen router, or of `of`."""
    return f"{metric}{{{of}, {matchers}}}" if matchers else f"{metric}{{{of}}}"


def rate(metric: str, matchers: str = "", by: str = "", of: str = ROUTER) -> str:
    """Its increase per second, summed up by some labels."""
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}(rate({selected(metric, matchers, of)}[$__rate_interval]))"


def quantiles(metric: str, of: str = ROUTER) -> tuple[tuple[str, str], ...]:
    """Median, p90 and p99 of a histogram."""
    buckets = rate(f"{metric}_bucket", by="le", of=of)
    return tuple(
        (f"histogram_quantile({q}, {buckets})", name)
        for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def top(expr: str, legend: str) -> tuple[tuple[str, str], ...]:
    """The `$top` highest series: a thousand lines tell nothing, and are slow to draw."""
    return ((f"topk($top, {expr})", legend),)


def per_worker(metric: str) -> tuple[tuple[str, str], ...]:
    """One series a worker, of the chosen ones with most of it."""
    return top(selected(metric, 'worker=~"$worker"'), "worker {{worker}}")


def share(part: str, whole: str) -> str:
    """The rate of one counter over that of another."""
    return f"{rate(part)} / {rate(whole)}"


def bands(expr: str, bounds: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """How many series of `expr` are at most each bound: a heatmap's rows, counted by the server.

    So few series leave Prometheus however many workers there are. The highest bound is +Inf.
    """
    rows = [
        f'label_replace(count({expr} <= {bound}) or vector(0), "le", "{bound}", "", "")'
        for bound in (*bounds, "+Inf")
    ]
    return ((" or ".join(rows), "{{le}}"),)

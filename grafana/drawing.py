"""Panels, queries, variables and colours, as Grafana's JSON (schema 39, Grafana 10.4 and later).

Rates use `$__rate_interval`, which Grafana adapts to the scrape interval and the zoom. Panels show
sums, quantiles or the `$top` highest series, so that they can be read with hundreds of workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from grafana.limits import LEAST, Limit, firing

Kind = Literal["timeseries", "stat", "state-timeline", "heatmap", "table"]
ROUTER = 'instance="$router"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are pairs of PromQL and legend.

    `names` are the possible values of a label in the legend, if each value has its own colour.
    `alert` names the alert whose runbook entry describes what to do about the panel's values.
    `limits` are the values at which the colour changes; `says` are the texts for 1 and for 0.
    """

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 0  # of 24 columns; 0: the width of the row's panels
    kind: Kind = "timeseries"
    names: tuple[str, ...] = ()
    stacked: bool = False
    maximum: float | None = None
    alert: str = ""
    limits: tuple[Limit, ...] = ()
    says: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading. `width` is the width of panels without their own width."""

    title: str
    panels: tuple[Panel, ...]
    width: int = 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard file: the open row `well` shows the health, and folded rows show the details.

    `variables` follow the variable of the data source.
    """

    name: str
    description: str
    variables: tuple[dict[str, Any], ...]
    well: Row
    details: tuple[Row, ...]


def stat(
    title: str,
    description: str,
    unit: str,
    query: str,
    *limits: Limit,
    alert: str = "",
    says: tuple[str, str] | None = None,
) -> Panel:
    """Return a panel with one present number; six such panels fill a row.

    `alert` defaults to the alert of the first limit.
    """
    alert = alert or next((limit.alert for limit in limits), "")
    queries = ((query, title.lower()),)
    return Panel(
        title, description, unit, queries, 4, "stat", alert=alert, limits=limits, says=says
    )


# This query has a value only if Prometheus has loaded the recording rules. Without the rules no
# alert can fire, and a count of 0 alerts would wrongly look healthy.
_RULES_RUN = "0 * sum(job:warmroute_good_answers:rate5m)"


def firing_alerts(matchers: str = 'alertname=~"Warmroute.*"') -> tuple[Panel, Panel]:
    """Return two panels that count firing alerts: critical alerts, and warnings."""
    return (
        stat(
            "Critical alerts",
            "Critical alerts that fire now: act at once. If the panel shows no rules, Prometheus "
            "has not loaded the alert rules of this repository.",
            "short",
            f"count({_firing(matchers, 'critical')}) or {_RULES_RUN}",
            firing("critical"),
        ),
        stat(
            "Warnings",
            "Warnings that fire now: act within a day.",
            "short",
            f"count({_firing(matchers, 'warning')}) or {_RULES_RUN}",
            firing("warning"),
        ),
    )


def _firing(matchers: str, severity: str) -> str:
    return f'ALERTS{{{matchers}, alertstate="firing", severity="{severity}"}}'


def selected(metric: str, matchers: str = "", of: str = ROUTER) -> str:
    """Return a selector for the metric's series of the chosen router, or of the targets `of`."""
    return f"{metric}{{{of}, {matchers}}}" if matchers else f"{metric}{{{of}}}"


def rate(metric: str, matchers: str = "", by: str = "", of: str = ROUTER) -> str:
    """Return a query for the counter's increase per second, summed by the labels `by`."""
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}(rate({selected(metric, matchers, of)}[$__rate_interval]))"


def quantiles(metric: str, of: str = ROUTER) -> tuple[tuple[str, str], ...]:
    """Return queries and legends for median, p90 and p99 of a histogram."""
    buckets = rate(f"{metric}_bucket", by="le", of=of)
    return tuple(
        (f"histogram_quantile({q}, {buckets})", name)
        for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def top(expr: str, legend: str) -> tuple[tuple[str, str], ...]:
    """Return a query for the `$top` highest series; a thousand lines are slow and unreadable."""
    return ((f"topk($top, {expr})", legend),)


def per_worker(metric: str) -> tuple[tuple[str, str], ...]:
    """Return a query with a series for each of the chosen workers with the highest values."""
    return top(selected(metric, 'worker=~"$worker"'), "worker {{worker}}")


def share(part: str, whole: str) -> str:
    """Return a query for the rate of one counter divided by the rate of another counter."""
    return f"{rate(part)} / {rate(whole)}"


def bands(expr: str, bounds: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return a query for the rows of a heatmap: how many series of `expr` are at most each bound.

    Prometheus counts the series, so it sends few series for any number of workers. The highest
    bound is +Inf.
    """
    rows = [
        f'label_replace(count({expr} <= {bound}) or vector(0), "le", "{bound}", "", "")'
        for bound in (*bounds, "+Inf")
    ]
    return ((" or ".join(rows), "{{le}}"),)


SOURCE = {"type": "prometheus", "uid": "${datasource}"}
DATA_SOURCE = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "current": {},
}
# The URL of docs/operations.md; docs/deploy/compose.yaml mounts the file there.
RUNBOOK = {
    "name": "runbook",
    "label": "Runbook",
    "type": "textbox",
    "query": "/public/warmroute/operations.md",
    "hide": 2,
    "current": {
        "text": "/public/warmroute/operations.md",
        "value": "/public/warmroute/operations.md",
    },
}


def labels(name: str, label: str, query: str, several: bool = False) -> dict[str, Any]:
    """Return a variable with the values of a label, updated whenever the time range changes.

    With `several` readers may choose any number of values, and all values are chosen at first.
    """
    variable: dict[str, Any] = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 3 if several else 1,
        "current": {},
    }
    if several:
        every = {"text": ["All"], "value": ["$__all"]}
        variable |= {"multi": True, "includeAll": True, "allValue": ".*", "current": every}
    return variable


def choice(name: str, label: str, values: tuple[str, ...], first: str) -> dict[str, Any]:
    """Return a variable for the choice of one of a few values."""
    options = [{"text": value, "value": value, "selected": value == first} for value in values]
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": ",".join(values),
        "options": options,
        "current": {"text": first, "value": first},
    }


ONE_ROUTER = labels("router", "Router", "label_values(warmroute_inflight_requests, instance)")
# Links pass variables on by name, and "All" is no valid value of a variable for one router, so this
# variable has another name.
SOME_ROUTERS = labels(
    "routers", "Routers", "label_values(warmroute_inflight_requests, instance)", several=True
)
WORKER = labels(
    "worker",
    "Workers",
    'label_values(warmroute_worker_state{instance="$router"}, worker)',
    several=True,
)
_ENGINE_METRICS = (
    "vllm:num_requests_running|sglang:num_running_reqs|trtllm_num_requests_running|nv_.*_success"
)
ENGINES = labels(
    "engine", "Engines", f'label_values({{__name__=~"{_ENGINE_METRICS}"}}, instance)', several=True
)
TOP = choice("top", "Top series", ("5", "10", "20", "50"), "10")
# Bounds of the router's histogram buckets, as in the label `le`. A target between two bounds would
# not work, because a histogram has no counts between bounds.
TTFT = choice(
    "ttft", "First-token target, s", ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0"), "1.0"
)
TPOT = choice(
    "tpot", "Between-tokens target, s", ("0.01", "0.02", "0.03", "0.05", "0.1", "0.25"), "0.05"
)
OBJECTIVE = choice("objective", "Objective", ("0.9", "0.95", "0.99", "0.999"), "0.99")


# People with any common kind of colour blindness can distinguish these colours. They are from Okabe
# and Ito (2008), with grey instead of black, which is invisible on a dark page; wine and teal are
# from Paul Tol (2021).
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
WINE, TEAL = "#882255", "#44AA99"
BY_DIGIT = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY, WINE, TEAL)
# Within a panel each name takes the first free colour; names of trouble take a warm colour.
WARM, COOL = (RED, ORANGE, YELLOW, WINE), (BLUE, GREEN, SKY, PURPLE, GREY, TEAL)
TROUBLE = re.compile(
    r"down|silent|ejected|trial|busy|: fallback|: retry|hot|flaps|cut short|retries( refused)?"
    r"|ejections|no_worker_available|hold_queue_full|hold_timeout|router_full|raised|nan|shape"
    r"|slow( clients)?|gaps?|failed_polls|disconnects|restarts|overflows|dropped_\w+"
    r"|skipped_events|stale"
    r"|miscounted|beyond_bound|unknown_worker|refused entries|conflicts|overrun|kv_blocks"
    r"|max_batch_size|invalid HTTP|preempted|worker|router|5 minutes|1 hour"
)


COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8, "state-timeline": 8, "heatmap": 8, "table": 8}


def uid_of(name: str) -> str:
    """Return the uid of a dashboard, which is the end of its URL."""
    return f"warmroute-{name}"


def drawn(dashboard: Dashboard, all_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the dashboard as Grafana imports it, with links to all dashboards in order."""
    return {
        "uid": uid_of(dashboard.name),
        "title": f"warmroute {dashboard.name}",
        "description": dashboard.description,
        "tags": ["warmroute"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_marks()]},
        "links": [_link(name) for name in all_names],
        "templating": {"list": [DATA_SOURCE, *dashboard.variables, RUNBOOK]},
        "panels": list(_placed(dashboard)),
    }


def _marks() -> dict[str, Any]:
    """Return the annotation that marks the times at which an alert fired."""
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "expr": 'ALERTS{alertname=~"Warmroute.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{worker}}",
        "iconColor": ORANGE,
        "step": "60s",
    }


def _link(name: str) -> dict[str, Any]:
    """Return a link that opens a dashboard with the same time range and variables."""
    return {
        "title": name,
        "type": "link",
        "icon": "dashboard",
        "url": f"/d/{uid_of(name)}",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _placed(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Yield rows and panels with numbers, from top to bottom; a folded row contains its panels."""
    numbers = count(1)
    yield _heading(dashboard.well, next(numbers), 0)
    y = 1
    for panel in _laid(dashboard.well, y, numbers):
        yield panel
        y = max(y, panel["gridPos"]["y"] + panel["gridPos"]["h"])
    for row in dashboard.details:
        heading = _heading(row, next(numbers), y)
        yield heading | {"collapsed": True, "panels": list(_laid(row, y + 1, numbers))}
        y += 1


def _heading(row: Row, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    shown = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
    return {"id": number, **shown, "gridPos": place}


def _laid(row: Row, y: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield the row's panels, from left to right and from top to bottom."""
    x = height = 0
    for panel in row.panels:
        width = panel.width or row.width
        if x + width > COLUMNS:
            x, y, height = 0, y + height, 0
        height = max(height, HEIGHTS[panel.kind])
        place = {"x": x, "y": y, "w": width, "h": HEIGHTS[panel.kind]}
        yield {"id": next(numbers), **_panel(panel), "gridPos": place}
        x += width


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    defaults |= _LOOKS[panel.kind](panel)
    if panel.limits:
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(panel.limits)}
    if panel.says:
        texts = {"1": {"text": panel.says[0]}, "0": {"text": panel.says[1]}}
        defaults["mappings"] = [{"type": "value", "options": texts}]
    link = {
        "title": f"What to do: {panel.alert}",
        "url": f"${{runbook}}#{panel.alert.lower()}",
        "targetBlank": True,
    }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "links": [link] if panel.alert else [],
        "targets": [_target(panel, *target) for target in enumerate(panel.queries)],
        "transformations": _TIMELESS if panel.kind == "table" else [],
        "fieldConfig": {"defaults": defaults, "overrides": _colors(panel)},
        "options": _options(panel),
    }


def _target(panel: Panel, number: int, query: tuple[str, str]) -> dict[str, Any]:
    expr, legend = query
    target = {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expr}
    if panel.kind == "heatmap":  # in this format Grafana converts cumulative buckets
        return target | {"legendFormat": legend, "format": "heatmap"}
    if panel.kind == "table":
        return target | {"legendFormat": legend, "format": "table", "instant": True}
    return target | {"legendFormat": legend}


_BY_LIMIT = {"mode": "thresholds"}


def _steps(limits: tuple[Limit, ...]) -> list[dict[str, Any]]:
    """Return Grafana's thresholds: a value, and the colour from that value on."""
    (side,) = {limit.side for limit in limits}
    ascending = sorted(limits, key=lambda limit: limit.value)
    colors = [RED if limit.severity == "critical" else ORANGE for limit in ascending]
    colors = [GREEN, *colors] if side == "above" else [*colors, GREEN]
    values = [None, *(limit.value for limit in ascending)]
    return [{"color": c, "value": v} for c, v in zip(colors, values, strict=True)]


def _stat(panel: Panel) -> dict[str, Any]:
    looks: dict[str, Any] = {"noValue": "no rules" if "ALERTS" in panel.queries[0][0] else "-"}
    return looks | {"color": _BY_LIMIT if panel.limits else {"mode": "fixed", "fixedColor": BLUE}}


def _timeseries(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 2, "fillOpacity": 0, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 60, "lineWidth": 1, "stacking": {"mode": "normal", "group": "A"}}
    if _any_is_trouble(panel):  # a threshold line would coincide with the axis
        return {"color": _BY_LIMIT, "custom": custom | {"gradientMode": "scheme"}}
    if panel.limits:
        custom |= {"thresholdsStyle": {"mode": "dashed"}}
    return {"color": {"mode": "palette-classic"}, "custom": custom}


def _any_is_trouble(panel: Panel) -> bool:
    return any(limit.value == LEAST for limit in panel.limits)


def _state_timeline(panel: Panel) -> dict[str, Any]:
    return {"color": _BY_LIMIT, "custom": {"lineWidth": 0, "fillOpacity": 80}}


def _plain(panel: Panel) -> dict[str, Any]:
    return {}


_TIMELESS = [{"id": "organize", "options": {"excludeByName": {"Time": True}}}]
_LOOKS = {
    "stat": _stat,
    "timeseries": _timeseries,
    "state-timeline": _state_timeline,
    "heatmap": _plain,
    "table": _plain,
}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        painted = "background" if panel.limits else "value"
        return {"reduceOptions": last, "colorMode": painted, "graphMode": "area"}
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    tooltip = {"mode": "multi", "sort": "desc"}
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "color": {"mode": "scheme", "scheme": "Cividis", "exponent": 0.5, "steps": 64},
            "yAxis": {"unit": panel.unit},
            "rowsFrame": {"layout": "le"},
            "cellValues": {"unit": "short"},
            "legend": {"show": True},
        }
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    if panel.kind == "state-timeline":
        return {"legend": legend, "tooltip": tooltip, "mergeValues": True, "showValue": "auto"}
    return {"legend": legend | {"calcs": ["lastNotNull", "max"]}, "tooltip": tooltip}


def _colors(panel: Panel) -> list[dict[str, Any]]:
    """Return colours of the panel's series: by the last digit of workers, otherwise by name."""
    legends = tuple(legend for _, legend in panel.queries)
    if panel.kind != "timeseries" or _any_is_trouble(panel):
        return []
    if legends == ("worker {{worker}}",):
        return [_override(f"/^worker \\d*{n}$/", color) for n, color in enumerate(BY_DIGIT)]
    names = panel.names or tuple(name for name in legends if "{{" not in name)
    return [_override(f"/{name}$/", color) for name, color in colors_of(names).items()]


def colors_of(names: tuple[str, ...]) -> dict[str, str]:
    """Return a colour for each name. The colours differ while there are enough colours."""
    colors: dict[str, str] = {}
    for name in names:
        first = (*WARM, *COOL) if TROUBLE.fullmatch(name) else (*COOL, *WARM)
        colors[name] = next((color for color in first if color not in colors.values()), GREY)
    return colors


def _override(pattern: str, color: str) -> dict[str, Any]:
    value = {"mode": "fixed", "fixedColor": color}
    return {
        "matcher": {"id": "byRegexp", "options": pattern},
        "properties": [{"id": "color", "value": value}],
    }

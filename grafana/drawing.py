"""Panels, queries, variables and colours, as Grafana's JSON (schema 39, Grafana 10.4 and later).

Rates are over `$__rate_interval`, which Grafana fits to the scrape interval and the zoom. With
hundreds of workers a panel shows sums, quantiles or the `$top` highest of them, never all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    width: int = 0  # of 24 columns; 0: as its row says
    kind: Kind = "timeseries"
    names: tuple[str, ...] = ()
    stacked: bool = False
    maximum: float | None = None
    alert: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading; `width`: of those that have none of their own."""

    title: str
    panels: tuple[Panel, ...]
    width: int = 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file. `variables` come after the data source's."""

    name: str
    description: str
    variables: tuple[dict[str, Any], ...]
    rows: tuple[Row, ...]


def stat(
    title: str, description: str, unit: str, queries: tuple[tuple[str, str], ...], alert: str = ""
) -> Panel:
    """One number as of now; six of them fill a row."""
    return Panel(title, description, unit, queries, 4, "stat", alert=alert)


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


SOURCE = {"type": "prometheus", "uid": "${datasource}"}
DATA_SOURCE = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "current": {},
}
# Where docs/operations.md is to be read; docs/deploy/compose.yaml puts it there.
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
    """The values of a label, asked for anew whenever the time range changes.

    `several`: any number of them, all to begin with.
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
    """One of a few values."""
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
SOME_ROUTERS = labels(
    "router", "Routers", "label_values(warmroute_inflight_requests, instance)", several=True
)
WORKER = labels(
    "worker",
    "Workers",
    'label_values(warmroute_worker_state{instance="$router"}, worker)',
    several=True,
)
ENGINES = labels(
    "engine", "Engines", "label_values(vllm:num_requests_running, instance)", several=True
)
TOP = choice("top", "Highest", ("5", "10", "20", "50"), "10")
# Bounds of the router's buckets, as `le` says them: between two of them nothing is known.
TTFT = choice("ttft", "First token, s", ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0"), "1.0")
TPOT = choice("tpot", "Between tokens, s", ("0.01", "0.02", "0.03", "0.05", "0.1", "0.25"), "0.05")
OBJECTIVE = choice("objective", "Objective", ("0.9", "0.95", "0.99", "0.999"), "0.99")


# Told apart with every common kind of colour blindness: Okabe and Ito (2008), grey for their
# black, which vanishes on a dark page; wine and teal of Paul Tol's schemes (2021).
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
WINE, TEAL = "#882255", "#44AA99"
BY_DIGIT = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY, WINE, TEAL)
# Within a panel each name takes the first colour that is left: what is trouble a warm one.
WARM, COOL = (RED, ORANGE, YELLOW, WINE), (BLUE, GREEN, SKY, PURPLE, GREY, TEAL)
TROUBLE = re.compile(
    r"down|silent|ejected|trial|busy|: fallback|: retry|hot|flaps|cut short|retries( refused)?"
    r"|ejections|no_worker_available|hold_queue_full|hold_timeout|router_full|raised|nan|shape|slow"
    r"|gaps?|failed_polls|disconnects|restarts|overflows|dropped_\w+|skipped_events|stale"
    r"|miscounted|beyond_bound|unknown_worker|refused entries|conflicts|overrun|kv_blocks"
    r"|max_batch_size|no HTTP|preempted|worker|router|5 minutes|1 hour"
)


COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8, "state-timeline": 8, "heatmap": 8, "table": 8}


def drawn(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
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
        "annotations": {"list": [_firing()]},
        "links": [_others()],
        "templating": {"list": [DATA_SOURCE, *dashboard.variables, RUNBOOK]},
        "panels": list(_placed(dashboard.rows)),
    }


def _firing() -> dict[str, Any]:
    """Marks where one of our alerts fired."""
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


def _others() -> dict[str, Any]:
    """All of our dashboards, opened at the same time with the same choices."""
    return {
        "title": "warmroute",
        "type": "dashboards",
        "tags": ["warmroute"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _placed(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Rows and panels, numbered, laid out from left to right and from top to bottom."""
    number = 0
    y = 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        heading = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        yield {"id": number, **heading, "gridPos": place}
        y += 1
        x = height = 0
        for panel in row.panels:
            width = panel.width or row.width
            if x + width > COLUMNS:
                x, y, height = 0, y + height, 0
            number += 1
            height = max(height, HEIGHTS[panel.kind])
            place = {"x": x, "y": y, "w": width, "h": HEIGHTS[panel.kind]}
            yield {"id": number, **_panel(panel), "gridPos": place}
            x += width
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    defaults |= _LOOKS[panel.kind](panel)
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
        "fieldConfig": {"defaults": defaults, "overrides": _colors(panel)},
        "options": _options(panel),
    }


def _target(panel: Panel, number: int, query: tuple[str, str]) -> dict[str, Any]:
    expr, legend = query
    target = {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expr}
    if panel.kind == "heatmap":  # Grafana takes apart what is cumulated by `le`
        return target | {"legendFormat": legend, "format": "heatmap"}
    if panel.kind == "table":
        return target | {"legendFormat": legend, "format": "table", "instant": True}
    return target | {"legendFormat": legend}


def _stat(panel: Panel) -> dict[str, Any]:
    return {"color": {"mode": "fixed", "fixedColor": BLUE}}


def _timeseries(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 2, "fillOpacity": 0, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 60, "lineWidth": 1, "stacking": {"mode": "normal", "group": "A"}}
    return {"color": {"mode": "palette-classic"}, "custom": custom}


def _state_timeline(panel: Panel) -> dict[str, Any]:
    known = {"text": "known", "color": GREEN}
    unknown = {"text": "unknown", "color": ORANGE}
    return {
        "color": {"mode": "fixed", "fixedColor": GREY},
        "mappings": [{"type": "value", "options": {"1": known, "0": unknown}}],
    }


def _plain(panel: Panel) -> dict[str, Any]:
    return {}


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
        return {"reduceOptions": last, "colorMode": "value", "graphMode": "area"}
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
    """Colours of its series: by a worker's last digit, else by the names it can show."""
    legends = tuple(legend for _, legend in panel.queries)
    if panel.kind != "timeseries":
        return []
    if legends == ("worker {{worker}}",):
        return [_override(f"/^worker \\d*{n}$/", color) for n, color in enumerate(BY_DIGIT)]
    names = panel.names or tuple(name for name in legends if "{{" not in name)
    return [_override(f"/{name}$/", color) for name, color in colors_of(names).items()]


def colors_of(names: tuple[str, ...]) -> dict[str, str]:
    """A colour for each name, no two alike as long as there are enough."""
    colors: dict[str, str] = {}
    for name in names:
        first = (*WARM, *COOL) if TROUBLE.fullmatch(name) else (*COOL, *WARM)
        colors[name] = next((one for one in first if one not in colors.values()), GREY)
    return colors


def _override(pattern: str, color: str) -> dict[str, Any]:
    value = {"mode": "fixed", "fixedColor": color}
    return {
        "matcher": {"id": "byRegexp", "options": pattern},
        "properties": [{"id": "color", "value": value}],
    }

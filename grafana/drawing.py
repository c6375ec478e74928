"""Panels, queries, variables and colours, as Grafana's JSON (schema 39, Grafana 10.4 and later).

Rates are over `$__rate_interval`, which Grafana fits to the scrape interval and the zoom. With
hundreds of workers a panel shows sums, quantiles or the `$top` highest of them, never all.
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
    """One panel. `queries` are (PromQL, legend).

    `names`: what a label in the legend can be, where each value has a colour of its own.
    `alert`: the alert whose runbook entry says what to do about what is seen here.
    `limits`: the values that colour it; `says`: what 1 and 0 mean, in words.
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
    limits: tuple[Limit, ...] = ()
    says: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading; `width`: of those that have none of their own."""

    title: str
    panels: tuple[Panel, ...]
    width: int = 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file: an open row that says whether all is well, and folded ones with the details.

    `variables` come after the data source's.
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
    """One number as of now; six of them fill a row.

    `alert`: of its first limit, unless told.
    """
    alert = alert or next((one.alert for one in limits), "")
    queries = ((query, title.lower()),)
    return Panel(
        title, description, unit, queries, 4, "stat", alert=alert, limits=limits, says=says
    )


# This query has a value only if Prometheus has loaded our recording rules. Without the rules no
# alert can fire, and a count of 0 alerts would wrongly look healthy.
_RULES_RUN = "0 * sum(job:warmroute_good_answers:rate5m)"


def firing_alerts(matchers: str = 'alertname=~"Warmroute.*"') -> tuple[Panel, Panel]:
    """Two panels that count the alerts which fire now: critical ones, and warnings."""
    return (
        stat(
            "Critical alerts",
            "Alerts that fire now and want somebody at once. No rules: Prometheus has not loaded "
            "the rules of this repository.",
            "short",
            f"count({_firing(matchers, 'critical')}) or {_RULES_RUN}",
            firing("critical"),
        ),
        stat(
            "Warnings",
            "Alerts that fire now and can wait for the morning.",
            "short",
            f"count({_firing(matchers, 'warning')}) or {_RULES_RUN}",
            firing("warning"),
        ),
    )


def _firing(matchers: str, severity: str) -> str:
    return f'ALERTS{{{matchers}, alertstate="firing", severity="{severity}"}}'


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
# Links carry choices along by their names, and "all of them" is no choice of one.
SOME_ROUTERS = labels(
    "routers", "Routers", "label_values(warmroute_inflight_requests, instance)", several=True
)
WORKER = labels(
    "worker",
    "Workers",
    'label_values(warmroute_worker_state{instance="$router"}, worker)',
    several=True,
)
_TOLD = (
    "vllm:num_requests_running|sglang:num_running_reqs|trtllm_num_requests_running|nv_.*_success"
)
ENGINES = labels(
    "engine", "Engines", f'label_values({{__name__=~"{_TOLD}"}}, instance)', several=True
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


def uid_of(name: str) -> str:
    """The end of a dashboard's URL, which links name."""
    return f"warmroute-{name}"


def drawn(dashboard: Dashboard, all_names: tuple[str, ...]) -> dict[str, Any]:
    """The dashboard as Grafana imports it, with links to all in their order."""
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


def _link(name: str) -> dict[str, Any]:
    """A dashboard, opened at the same time with the same choices."""
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
    """Rows and panels, numbered, from top to bottom; a folded row has its panels inside."""
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
    """The row's panels, from left to right and from top to bottom."""
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
        said = {"1": {"text": panel.says[0]}, "0": {"text": panel.says[1]}}
        defaults["mappings"] = [{"type": "value", "options": said}]
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
    if panel.kind == "heatmap":  # Grafana takes apart what is cumulated by `le`
        return target | {"legendFormat": legend, "format": "heatmap"}
    if panel.kind == "table":
        return target | {"legendFormat": legend, "format": "table", "instant": True}
    return target | {"legendFormat": legend}


_BY_LIMIT = {"mode": "thresholds"}


def _steps(limits: tuple[Limit, ...]) -> list[dict[str, Any]]:
    """Grafana's thresholds: a colour from each value on, the first from below all of them."""
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
    if _any_is_trouble(panel):  # a line at the limit would lie on the axis
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
    """Colours of its series: by a worker's last digit, else by the names it can show."""
    legends = tuple(legend for _, legend in panel.queries)
    if panel.kind != "timeseries" or _any_is_trouble(panel):
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

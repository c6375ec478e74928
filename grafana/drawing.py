"""Panels as Grafana's JSON wants them (schema 39, Grafana 10.4 and later)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grafana.colors import BLUE, BY_DIGIT, BY_NAME, GREEN, GREY, ORANGE
from grafana.panel import Dashboard, Panel, Row
from grafana.variables import DATA_SOURCE, RUNBOOK, SOURCE

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
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            number += 1
            height = max(height, HEIGHTS[panel.kind])
            place = {"x": x, "y": y, "w": panel.width, "h": HEIGHTS[panel.kind]}
            yield {"id": number, **_panel(panel), "gridPos": place}
            x += panel.width
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
    return [_override(f"/{name}$/", BY_NAME.get(name, BLUE)) for name in names]


def _override(pattern: str, color: str) -> dict[str, Any]:
    value = {"mode": "fixed", "fixedColor": color}
    return {
        "matcher": {"id": "byRegexp", "options": pattern},
        "properties": [{"id": "color", "value": value}],
    }

"""Writes router.json: python -m grafana.make_dashboard. A test holds the file to this script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana.panels import DECISIONS, GLANCE, LATENCY, LOAD, Panel, Row
from grafana.panels_kv import KV, TOKENS
from grafana.panels_sessions import SESSIONS
from grafana.panels_trouble import QUEUE, WORKERS

FILE = Path(__file__).with_name("router.json")
ROWS = (GLANCE, DECISIONS, LOAD, LATENCY, QUEUE, SESSIONS, WORKERS, KV, TOKENS)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
LINE = 160  # characters of a line in the file
HEIGHTS = {"stat": 4, "timeseries": 8, "state-timeline": 8}

# Told apart with every common kind of colour blindness: Okabe and Ito (2008), grey for their
# black, which vanishes on a dark page; wine and teal of Paul Tol's schemes (2021).
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
WINE, TEAL = "#882255", "#44AA99"
BY_DIGIT = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY, WINE, TEAL)
# The same thing has the same colour in every panel; warm colours are trouble.
BY_NAME = {
    ": policy": BLUE,
    ": only_worker": GREY,
    ": retry": ORANGE,
    ": held": PURPLE,
    ": fallback": RED,
    "p50": SKY,
    "p90": BLUE,
    "p99": PURPLE,
    "prompt": GREY,
    "expected hits": SKY,
    "reported hits": GREEN,
    "prompt of those that report": WINE,
    "ready": GREEN,
    "joining": SKY,
    "draining": GREY,
    "ejected": ORANGE,
    "down": RED,
    "in flight": BLUE,
    "active": BLUE,
    "idle": GREY,
    "new": ORANGE,
    "cold": PURPLE,
    "warm": GREEN,
    "forgotten blocks": GREY,
    "shared": GREY,
    "hot": RED,
    "given way": ORANGE,
    "held": ORANGE,
    "holds": GREY,
    "retries": ORANGE,
    "ejections": RED,
    "no_worker_available": RED,
    "hold_queue_full": ORANGE,
    "hold_timeout": YELLOW,
    "router_full": WINE,
    "worker_error": PURPLE,
    "model_not_found": SKY,
    "context_length_exceeded": BLUE,
    "policy_failed": TEAL,
    "raised": RED,
    "nan": PURPLE,
    "shape": WINE,
    "slow": YELLOW,
    "terms": GREY,
    "suspended": BLUE,
    "template refusals": ORANGE,
    "failed_syncs": PURPLE,
    "overflows": RED,
    "gaps": RED,
    "malformed_frames": PURPLE,
    "dropped_batches": WINE,
    "dropped_frames": ORANGE,
    "failed_polls": YELLOW,
    "waiting": ORANGE,
    "parked": GREY,
    "restarts": ORANGE,
    "replays": BLUE,
    "snapshots": SKY,
    "skipped_events": YELLOW,
    "orphans": GREY,
    "duplicates": TEAL,
    "clears": GREEN,
    "batches": GREY,
    "stored_blocks": GREEN,
    "removed_blocks": ORANGE,
    "distinct": BLUE,
    "gpu": GREEN,
    "host": SKY,
    "disk": GREY,
    "mirrored": PURPLE,
    "index": BLUE,
    "names": SKY,
    "mirrors": PURPLE,
    "token ids": GREY,
    "fewer": ORANGE,
    "more": SKY,
    "encoded": BLUE,
    "reused": GREEN,
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it (schema 39, Grafana 10.4 and later)."""
    return {
        "title": "warmroute router",
        "description": "One router: where requests go, why, how fast, and what is wrong.",
        "tags": ["warmroute"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": [_source_variable(), _router_variable()]},
        "panels": list(_placed(ROWS)),
    }


def _source_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }


def _router_variable() -> dict[str, Any]:
    query = "label_values(warmroute_inflight_requests, instance)"
    return {
        "name": "router",
        "label": "Router",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "router"},
        "refresh": 2,
        "sort": 1,
        "current": {},
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
                x, y = 0, y + height
            number += 1
            height = HEIGHTS[panel.kind]
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            yield {"id": number, **_panel(panel), "gridPos": place}
            x += panel.width
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    defaults |= _LOOKS[panel.kind](panel)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for n, (expr, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": _colors(panel)},
        "options": _options(panel),
    }


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


_LOOKS = {"stat": _stat, "timeseries": _timeseries, "state-timeline": _state_timeline}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": last, "colorMode": "value", "graphMode": "area"}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    tooltip = {"mode": "multi", "sort": "desc"}
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


def pretty(value: Any, indent: str = "") -> str:
    """JSON with every part that fits into a line on one line, so that changes read well."""
    short = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(short) <= LINE or not isinstance(value, dict | list) or not value:
        return short
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + pretty(item, inner) for item in value) + f"\n{indent}]"


if __name__ == "__main__":
    FILE.write_text(pretty(dashboard()) + "\n", encoding="utf-8")

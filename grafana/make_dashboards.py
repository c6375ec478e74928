"""Writes the dashboards: python -m grafana.make_dashboards. A test compares the files with the
output of this script.

The dashboards `router` and `fleet` show one router at a time (`$router`), because each router
numbers its workers itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana import drawing as variables
from grafana.drawing import Dashboard, drawn
from grafana.panels_engine import BLOCKS, CACHE, REQUESTS, SPEED, STEPS, TRANSFERS, WAITING
from grafana.panels_engine import WELL as WELL_ENGINES
from grafana.panels_fleet import ENGINES, LOAD, SOURCES, SPREAD, STATE
from grafana.panels_fleet import WELL as WELL_FLEET
from grafana.panels_kv import KV, REPLICAS, TOKENS
from grafana.panels_router import (
    DECISIONS,
    IMBALANCE,
    LATENCY,
    LEGS,
    MODELS,
    PICKER,
    SESSIONS,
)
from grafana.panels_router import WELL as WELL_ROUTER
from grafana.panels_slo import (
    BLAME,
    BUDGET,
    CLIENT_PORT,
    LATENCIES,
    NAMES,
    QUEUE,
    STREAMS,
    TENANTS,
    WORKERS,
)
from grafana.panels_slo import WELL as WELL_CLIENTS

# The files are in the Helm chart, because a chart must not link to files outside its folder. The
# links beside this script point to the files.
FOLDER = Path(__file__).parents[1] / "docs" / "deploy" / "helm" / "warmroute" / "dashboards"
LINE = 160  # characters in a line of a dashboard file
# In the order of the links between dashboards; readers look at the first dashboard first.
DASHBOARDS = (
    Dashboard(
        "slo",
        "Latency against targets that you choose, errors by cause, and the error budget.",
        (variables.SOME_ROUTERS, variables.TTFT, variables.TPOT, variables.OBJECTIVE),
        WELL_CLIENTS,
        (LATENCIES, BLAME, BUDGET),
    ),
    Dashboard(
        "router",
        "One router: its decisions and their reasons, latency, KV events, and faults.",
        (variables.ONE_ROUTER, variables.WORKER, variables.TOP),
        WELL_ROUTER,
        (
            *(DECISIONS, IMBALANCE, LATENCY, QUEUE, MODELS, CLIENT_PORT, TENANTS, SESSIONS),
            *(WORKERS, STREAMS, NAMES, LEGS, PICKER, KV, TOKENS, REPLICAS),
        ),
    ),
    Dashboard(
        "fleet",
        "The workers of one router: state, load and caches, for a few workers or a thousand.",
        (variables.ONE_ROUTER, variables.WORKER, variables.TOP),
        WELL_FLEET,
        (STATE, SPREAD, LOAD, ENGINES, SOURCES),
    ),
    Dashboard(
        "engine",
        "Engines' own metrics: batches, caches and latency.",
        (variables.ENGINES, variables.TOP),
        WELL_ENGINES,
        (REQUESTS, CACHE, SPEED, STEPS, WAITING, BLOCKS, TRANSFERS),
    ),
)


def file_of(dashboard: Dashboard) -> Path:
    """Return the path of the dashboard's file."""
    return FOLDER / f"{dashboard.name}.json"


def pretty(value: Any, indent: str = "") -> str:
    """Return JSON with each value that fits into a line on one line, so that diffs are short."""
    short = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(short) <= LINE or not isinstance(value, dict | list) or not value:
        return short
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + pretty(item, inner) for item in value) + f"\n{indent}]"


def written(dashboard: Dashboard) -> str:
    """Return the text of the dashboard's file."""
    return pretty(drawn(dashboard, tuple(each.name for each in DASHBOARDS))) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        file_of(each).write_text(written(each), encoding="utf-8")

"""Writes the dashboards: python -m grafana.make_dashboards. A test holds the files to this script.

The dashboards of the router and of the fleet show one router at a time (`$router`): worker ids
belong to a router.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana import drawing as variables
from grafana.drawing import Dashboard, drawn
from grafana.panels_engine import BLOCKS, CACHE, REQUESTS, SPEED, STEPS, TRANSFERS, WAITING
from grafana.panels_engine import WELL as WELL_ENGINES
from grafana.panels_fleet import LOAD, SOURCES, SPREAD, STATE, TOLD
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
    DOOR,
    LATENCIES,
    NAMES,
    QUEUE,
    STREAMS,
    TENANTS,
    WORKERS,
)
from grafana.panels_slo import WELL as WELL_CLIENTS

# The chart carries them, for it must have no link out of its folder; those beside this lead there.
FOLDER = Path(__file__).parents[1] / "docs" / "deploy" / "helm" / "warmroute" / "dashboards"
LINE = 160  # characters of a line in the file
# In the order of their links: the first one is where to look first.
DASHBOARDS = (
    Dashboard(
        "slo",
        "What clients get, against targets of your choice, and whose fault the rest is.",
        (variables.SOME_ROUTERS, variables.TTFT, variables.TPOT, variables.OBJECTIVE),
        WELL_CLIENTS,
        (LATENCIES, BLAME, BUDGET),
    ),
    Dashboard(
        "router",
        "One router: where requests go, why, how fast, and what is wrong.",
        (variables.ONE_ROUTER, variables.WORKER, variables.TOP),
        WELL_ROUTER,
        (
            *(DECISIONS, IMBALANCE, LATENCY, QUEUE, MODELS, DOOR, TENANTS, SESSIONS),
            *(WORKERS, STREAMS, NAMES, LEGS, PICKER, KV, TOKENS, REPLICAS),
        ),
    ),
    Dashboard(
        "fleet",
        "The workers of one router: state, load, caches; few of them or a thousand.",
        (variables.ONE_ROUTER, variables.WORKER, variables.TOP),
        WELL_FLEET,
        (STATE, SPREAD, LOAD, TOLD, SOURCES),
    ),
    Dashboard(
        "engine",
        "Engines by their own account: batches, caches, and how fast they answer.",
        (variables.ENGINES, variables.TOP),
        WELL_ENGINES,
        (REQUESTS, CACHE, SPEED, STEPS, WAITING, BLOCKS, TRANSFERS),
    ),
)


def file_of(dashboard: Dashboard) -> Path:
    """Where it is written."""
    return FOLDER / f"{dashboard.name}.json"


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


def written(dashboard: Dashboard) -> str:
    """What its file says."""
    return pretty(drawn(dashboard, tuple(each.name for each in DASHBOARDS))) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        file_of(each).write_text(written(each), encoding="utf-8")

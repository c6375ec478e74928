"""What the reader chooses at the top of a dashboard."""

from __future__ import annotations

from typing import Any

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

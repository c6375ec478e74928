"""All panels of the dashboards, the metrics that no panel shows, and panels without data in a
healthy stack, with reasons.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grafana.make_dashboards import DASHBOARDS, file_of

_QUANTILES = "the quantiles come from the buckets"
_OFF = "of a file that is off by default"

# Series of the router.
NOT_SHOWN = {
    "warmroute_time_to_first_token_seconds_sum": _QUANTILES,
    "warmroute_inter_token_seconds_sum": _QUANTILES,
    "warmroute_request_seconds_sum": _QUANTILES,
    "warmroute_access_log_lines_total": "of a log that is off by default; it logs its trouble",
    "warmroute_migration_gap_seconds_count": _QUANTILES,
    "warmroute_migration_gap_seconds_sum": _QUANTILES,
    "warmroute_name_time_to_first_token_seconds_count": _QUANTILES,
    "warmroute_name_time_to_first_token_seconds_sum": _QUANTILES,
    "warmroute_request_log_lines_total": "of a log that is off by default; it logs its trouble",
    "warmroute_traces_total": "of tracing, which is off by default; it logs its trouble",
    "warmroute_kv_state_saves_total": f"{_OFF}; an alert tells of trouble",
    "warmroute_kv_state_bytes": _OFF,
    "warmroute_kv_state_age_seconds": _OFF,
    "warmroute_refused_models": "of a worker with more models than limits.models; it is logged",
    "warmroute_worker_mirrored": "an alert tells of it",
    "warmroute_refused_ranks": "of an engine with more ranks than workers; it is logged",
    "warmroute_server_deferred_total": "what it comes of, refusals, is shown by reason",
    "warmroute_prefill_leg_seconds_count": _QUANTILES,
    "warmroute_prefill_leg_seconds_sum": _QUANTILES,
    "warmroute_former_routers": "of a hot restart, which is logged",
    "warmroute_former_requests": "of a hot restart; they count among their workers' requests",
    "warmroute_models_to_wait_for": "of the configuration; an alert heeds it",
    "warmroute_session_blocks": "a full table is no trouble; what it forgets is shown",
}

# Series of our engines.
NOT_SHOWN_OF_ENGINES = {
    "vllm:time_to_first_token_seconds_count": _QUANTILES,
    "vllm:time_to_first_token_seconds_sum": _QUANTILES,
    "vllm:inter_token_latency_seconds_count": _QUANTILES,
    "vllm:inter_token_latency_seconds_sum": _QUANTILES,
    "vllm:e2e_request_latency_seconds_count": _QUANTILES,
    "vllm:e2e_request_latency_seconds_sum": _QUANTILES,
    "vllm:cache_config_info": "what it was started with, not what happens",
    "process_start_time_seconds": "when it was started, not what happens",
}

# Metrics without a series until their event has happened; panels with them are empty.
NO_DATA = {
    "warmroute_worker_kv_transfer_faults_total": "of workers that exchange KV, which these do not",
    "warmroute_pool_half_missing": "by group, and no group here lacks a half",
    "warmroute_role_work": "of `roles.follow`, which is off by default",
    "warmroute_engine_refused_total": "by reason, and no engine refuses anything",
    "warmroute_engine_graph_steps_total": "by use, and there are no CUDA graphs on CPUs",
    "warmroute_engine_kv_readers_refused_total": "by reason, and nobody is sent away",
    'finished_reason="error"': "by reason, and no request ends by an error",
    "count by (severity, alertname, instance) (ALERTS{": "nothing fires in a healthy stack",
}

# Alerts whose limit is not a colour of any panel.
NOT_COLOURED = {
    "WarmrouteNoFirstWorker": "a model that nobody asks for may have no worker",
    "WarmrouteCollapse": "it compares with the hour before",
    "WarmrouteOutOfFiles": "it is one of the reasons in a panel",
    "WarmrouteKvEventsUseless": "it compares two counters of a worker",
    "WarmrouteKvStateNotSaved": _OFF,
    "WarmrouteLateKvReads": "it is one of the faults in a panel",
}

PAGES = Path(__file__).with_name("pages")  # metrics pages as engines serve them
FILES = {each.name: json.loads(file_of(each).read_text(encoding="utf-8")) for each in DASHBOARDS}
PANELS = {
    (name, panel["title"]): panel
    for name, file in FILES.items()
    for shown in file["panels"]
    for panel in (shown["panels"] if shown["type"] == "row" else [shown])
}


def resolved(expr: str, router: str, engine: str = ".*") -> str:
    """Return the query that Grafana sends for a panel with a dashboard's default choices."""
    chosen = {"router": router, "routers": router, "engine": engine, "worker": ".*", "top": "10"}
    chosen |= {"ttft": "1.0", "tpot": "0.05", "objective": "0.99"}
    chosen |= {"__rate_interval": "5s", "__range": "10s"}
    return re.sub(r"\$(\w+)", lambda found: chosen[found[1]], expr)


def targets(panel: dict[str, Any]) -> list[str]:
    """Return the queries of a panel."""
    return [target["expr"] for target in panel["targets"]]

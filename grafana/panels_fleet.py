"""Panels of one router's workers and of the sources that list the workers."""

from __future__ import annotations

from grafana import engine_metrics as metrics
from grafana.drawing import (
    Panel,
    Row,
    bands,
    firing_alerts,
    per_worker,
    rate,
    selected,
    stat,
    top,
)
from grafana.limits import limit, missing
from grafana.panels_router import BUSIEST_NOW, QUEUE_S, READY, REPLIES_BY_WORKER

STATES = ("down", "silent", "ejected", "trial", "busy", "ready", "joining", "draining")
_STATE = selected("warmroute_worker_state")
_REQUESTS = selected("warmroute_worker_requests")
_KV = (
    f"{selected('warmroute_worker_kv_used_tokens')} / on (instance, worker) "
    f"{selected('warmroute_worker_kv_capacity_tokens')}"
)
_CHOSEN = 'worker=~"$worker"'
_UNKNOWN = f"sum({_STATE}) - sum({selected('warmroute_worker_kv_known')})"
_WORKER_INFO = (
    f"{selected('warmroute_worker_requests', _CHOSEN)} * on (instance, worker) "
    f"group_left (url, engine, role) {selected('warmroute_worker_info')}"
)
_ALL_ENGINES = 'job=~".+"'

_SHARE_OF_OTHERS = (
    f"sum(avg_over_time({selected('warmroute_worker_foreign_requests')}[10m])) / "
    f"(sum(avg_over_time({selected('warmroute_worker_foreign_requests')}[10m])) "
    f"+ sum(avg_over_time({selected('warmroute_worker_requests')}[10m])))"
)


def _in_state(states: str) -> str:
    matcher = f'state=~"{states}"'
    return f"sum({selected('warmroute_worker_state', matcher)}) or vector(0)"


WELL = Row(
    "Is it well?",
    (
        *firing_alerts('alertname=~"Warmroute.*", instance=~"$router|"'),
        stat(
            "Workers ready",
            "Workers that get new requests.",
            "short",
            f"{READY} or vector(0)",
            missing("WarmrouteNoWorker"),
        ),
        stat(
            "Workers down",
            "Workers that do not answer the router's health probes.",
            "short",
            _in_state("down"),
            limit("WarmrouteWorkerDown", "> "),
        ),
        stat(
            "Workers ejected",
            "Workers that get no requests for a while, or one request on trial, because they keep "
            "failing.",
            "short",
            _in_state("ejected|trial"),
            limit("WarmrouteWorkerEjected", "> "),
        ),
        stat(
            "Panic",
            "Most workers of a model leave health probes unanswered. The router moves no request, "
            "and new requests may wait.",
            "short",
            f"max({selected('warmroute_panic')})",
            limit("WarmroutePanic", "> "),
            says=("panic", "none"),
        ),
        stat(
            "Requests in flight",
            "Unfinished requests that this router sent to workers.",
            "short",
            f"sum({_REQUESTS})",
        ),
        stat(
            "Longest prefill queue",
            "Time that the fullest worker needs to compute its queued prompt tokens.",
            "s",
            f"max({QUEUE_S})",
            alert="WarmrouteHotSpot",
        ),
        stat(
            "Busiest / mean",
            "Requests of the busiest worker divided by the mean of all ready workers, over five "
            "minutes.",
            "short",
            BUSIEST_NOW,
            limit("WarmrouteHotSpot", "count, "),
        ),
        stat(
            "KV in use",
            "Share of all workers' KV memory that requests hold: the workers' latest reports, "
            "plus the tokens that the router sent since.",
            "percentunit",
            f"avg({_KV})",
        ),
        stat(
            "KV state unknown",
            "Workers whose caches the router does not know completely. Their expected hits are "
            "lower bounds.",
            "short",
            _UNKNOWN,
            alert="WarmrouteKvUnknown",
        ),
        stat(
            "Foreign requests",
            "Share of the requests at the workers that this router did not send, over ten minutes.",
            "percentunit",
            _SHARE_OF_OTHERS,
            limit("WarmrouteOthersTraffic", ") > "),
        ),
    ),
)

STATE = Row(
    "State",
    (
        Panel(
            "Workers by state",
            "joining: the router has not recognized the worker yet. draining: gets no new "
            "requests. silent: does not answer health probes. ejected: gets no requests for a "
            "while after repeated failures. trial: gets one request at a time after an ejection. "
            "down: failed its health probes. busy: refused a request for lack of room, so the "
            "router prefers other workers.",
            "short",
            ((f"sum by (state) ({_STATE})", "{{state}}"),),
            names=STATES,
            stacked=True,
            alert="WarmrouteWorkerEjected",
        ),
        Panel(
            "Panic and pauses",
            "Panic: 1 while most workers of a model leave health probes unanswered; the router "
            "then moves no request. Paused: share of the time for which the router's event loop "
            "stood still.",
            "short",
            (
                (selected("warmroute_panic"), "panic, {{model}}"),
                (rate("warmroute_paused_seconds_total"), "paused"),
            ),
            alert="WarmroutePanic",
        ),
        Panel(
            "Failures by worker",
            "Failures that count towards the ejection of a worker. The panel shows the workers "
            "with the most failures.",
            "suffix: per s",
            top(rate("warmroute_worker_failures_total", _CHOSEN, "worker"), "worker {{worker}}"),
            alert="WarmrouteWorkerEjected",
        ),
        Panel(
            "Worker numbers and URLs",
            "URL, engine and role of the worker with each number, and its requests. The table "
            "shows the workers with the most requests, or the workers chosen above.",
            "short",
            top(_WORKER_INFO, "worker {{worker}}"),
            kind="table",
        ),
    ),
)

SPREAD = Row(
    "Distribution of load",
    (
        Panel(
            "Workers by requests",
            "Number of workers by number of requests. One narrow band: the load is even. A band "
            "far above the others: a hot spot.",
            "short",
            bands(_REQUESTS, ("0", "1", "2", "4", "8", "16", "32", "64", "128", "256")),
            kind="heatmap",
            alert="WarmrouteHotSpot",
        ),
        Panel(
            "Workers by queued prefill",
            "Number of workers by time that their queued prompt tokens need.",
            "s",
            bands(QUEUE_S, ("0", "0.05", "0.1", "0.25", "0.5", "1", "2", "4", "8", "16")),
            kind="heatmap",
            alert="WarmrouteHotSpot",
        ),
        Panel(
            "Workers by KV in use",
            "Number of workers by share of KV memory that requests hold.",
            "percentunit",
            bands(_KV, ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1")),
            kind="heatmap",
        ),
    ),
)

LOAD = Row(
    "Load of the busiest workers",
    (
        Panel(
            "Requests by worker",
            "Unfinished requests that this router sent to the worker.",
            "short",
            per_worker("warmroute_worker_requests"),
        ),
        Panel(
            "Requests without a first token",
            "Unfinished requests that this router sent to the worker and that have no first token "
            "yet.",
            "short",
            per_worker("warmroute_worker_waiting_requests"),
        ),
        Panel(
            "Queued prefill",
            "Uncached prompt tokens that the worker has not computed yet. One worker far above "
            "the others is a hot spot.",
            "suffix: tokens",
            per_worker("warmroute_worker_queued_prefill_tokens"),
            alert="WarmrouteHotSpot",
        ),
        Panel(
            "Share of requests",
            "Each worker's share of all answers, including failed answers.",
            "percentunit",
            top(
                f"{REPLIES_BY_WORKER} / on () group_left () {rate('warmroute_replies_total')}",
                "worker {{worker}}",
            ),
            maximum=1.0,
        ),
        Panel(
            "Context",
            "KV tokens of the worker's requests that have their first token. Decoding reads these "
            "tokens in every step.",
            "suffix: tokens",
            per_worker("warmroute_worker_context_tokens"),
        ),
        Panel(
            "KV in use by worker",
            "Share of the worker's KV memory in use: the worker's latest report, plus the tokens "
            "that the router sent since.",
            "percentunit",
            top(_KV, "worker {{worker}}"),
        ),
        Panel(
            "Cached blocks",
            "Blocks in the worker's cache according to its KV events.",
            "suffix: blocks",
            per_worker("warmroute_worker_resident_blocks"),
            6,
        ),
        Panel(
            "Prefill speed, slowest workers",
            "Prompt tokens per second, measured on the worker's own answers.",
            "suffix: tokens/s",
            (
                (
                    "bottomk($top, "
                    f"{selected('warmroute_worker_prefill_tokens_per_second', _CHOSEN)})",
                    "worker {{worker}}",
                ),
            ),
            6,
        ),
        Panel(
            "Step time",
            "Time of one decode step, measured on the worker's own streams.",
            "s",
            per_worker("warmroute_worker_step_seconds"),
            6,
        ),
        Panel(
            "Not from this router",
            "Requests that the worker reports beyond the requests of this router: requests of "
            "other routers, and clients' direct requests.",
            "short",
            per_worker("warmroute_worker_foreign_requests"),
            6,
        ),
    ),
)

ENGINES = Row(
    "Metrics of all engines that Prometheus scrapes",
    (
        Panel(
            "Running and waiting requests",
            "Requests of all engines. Running: requests in the engines' batches. Waiting: "
            "requests that the engines have not admitted yet.",
            "short",
            (
                (f"sum({metrics.gauges(metrics.RUNNING, _ALL_ENGINES)})", "running"),
                (f"sum({metrics.gauges(metrics.WAITING, _ALL_ENGINES)})", "waiting"),
            ),
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "Why requests wait in warmroute-engine",
            "Request-steps (one request that waits for one step) per second, by reason of the "
            "wait. Other engines do not report reasons.",
            "suffix: per s",
            (
                (
                    rate("warmroute_engine_not_scheduled_total", by="reason", of=_ALL_ENGINES),
                    "{{reason}}",
                ),
            ),
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "KV usage of engines",
            "Share of KV blocks that requests hold, in the fullest engine, in the mean of all "
            "engines, and in the emptiest engine.",
            "percentunit",
            tuple(
                (f"{function}({metrics.gauges(metrics.KV_USAGE, _ALL_ENGINES)})", name)
                for function, name in (("max", "fullest"), ("avg", "mean"), ("min", "emptiest"))
            ),
            maximum=1.0,
        ),
        Panel(
            "Age of load reports",
            "Time since the worker's latest load report. If the report is old, the router relies "
            "on its own count of requests.",
            "s",
            per_worker("warmroute_worker_load_age_seconds"),
        ),
    ),
    width=6,
)


SOURCES = Row(
    "Sources of workers",
    (
        Panel(
            "Workers by source",
            "Workers that the router has from each source. The panel is empty if no source is "
            "configured.",
            "short",
            ((selected("warmroute_discovery_workers"), "{{source}}"),),
            alert="WarmrouteDiscoveryDown",
        ),
        Panel(
            "Readable sources",
            "1: the router can read the source. 0: the router cannot read the source, or the "
            "source suddenly lists no worker; the router keeps the source's workers.",
            "short",
            ((selected("warmroute_discovery_up"), "{{source}}"),),
            kind="state-timeline",
            alert="WarmrouteDiscoveryDown",
            limits=(limit("WarmrouteDiscoveryDown", "== "),),
            says=("readable", "not readable"),
        ),
        Panel(
            "Added and removed workers",
            "joined, left: workers that a source added or removed. flaps: workers that a source "
            "listed again soon after their removal. Cut short: workers removed with unfinished "
            "requests, at the end of drain_s.",
            "suffix: per s",
            (
                (rate("warmroute_discovery_changes_total", by="change"), "{{change}}"),
                (rate("warmroute_drains_cut_short_total"), "cut short"),
            ),
            names=("joined", "left", "flaps", "cut short"),
        ),
        Panel(
            "Faults of sources",
            "Refused entries: entries of sources that the router cannot use. Conflicts: workers "
            "that two sources list with different options. Seconds of silence: longest time since "
            "a source failed or listed no worker.",
            "short",
            (
                (f"sum({selected('warmroute_discovery_refused_entries')})", "refused entries"),
                (selected("warmroute_discovery_conflicts"), "conflicts"),
                (f"max({selected('warmroute_discovery_silent_seconds')})", "seconds of silence"),
            ),
        ),
    ),
    width=6,
)

"""Panels of the workers of one router and of the sources that name them."""

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
_WHO = (
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
            "Workers that are given new requests.",
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
            "Workers that are left out for a while, or on trial, for they keep failing.",
            "short",
            _in_state("ejected|trial"),
            limit("WarmrouteWorkerEjected", "> "),
        ),
        stat(
            "Panic",
            "Most workers of a model leave health probes unanswered, so its new requests wait.",
            "short",
            f"max({selected('warmroute_panic')})",
            limit("WarmroutePanic", "> "),
            says=("panic", "none"),
        ),
        stat(
            "Requests in flight",
            "Sent to workers by this router and not finished.",
            "short",
            f"sum({_REQUESTS})",
        ),
        stat(
            "Longest prefill queue",
            "Seconds of prompts that the fullest worker has yet to compute.",
            "s",
            f"max({QUEUE_S})",
            alert="WarmrouteHotSpot",
        ),
        stat(
            "Busiest / mean",
            "Requests of the busiest worker over the mean of all ready ones, over five minutes.",
            "short",
            BUSIEST_NOW,
            limit("WarmrouteHotSpot", "count, "),
        ),
        stat(
            "KV in use",
            "Share of the KV memory of all workers that requests hold, as reported and sent since.",
            "percentunit",
            f"avg({_KV})",
        ),
        stat(
            "KV state unknown",
            "Workers whose caches are not known for certain: their hits are a lower bound.",
            "short",
            _UNKNOWN,
            alert="WarmrouteKvUnknown",
        ),
        stat(
            "Others' share",
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
            "joining: not recognized yet. draining: nothing new. silent: leaves health probes "
            "unanswered. ejected: for a while, after failures in a row; trial: then given one "
            "request. down: fails its health probes. busy: says so, and others go first.",
            "short",
            ((f"sum by (state) ({_STATE})", "{{state}}"),),
            names=STATES,
            stacked=True,
            alert="WarmrouteWorkerEjected",
        ),
        Panel(
            "Silence",
            "Panic: 1 while most workers of a model leave health probes unanswered, so nothing "
            "moves. Paused: share of the time for which the router itself stood still.",
            "short",
            (
                (selected("warmroute_panic"), "panic, {{model}}"),
                (rate("warmroute_paused_seconds_total"), "paused"),
            ),
            alert="WarmroutePanic",
        ),
        Panel(
            "Failures by worker",
            "What counts towards ejecting a worker, the workers with most of it.",
            "suffix: per s",
            top(rate("warmroute_worker_failures_total", _CHOSEN, "worker"), "worker {{worker}}"),
            alert="WarmrouteWorkerEjected",
        ),
        Panel(
            "Who is who",
            "URL, engine and role behind a worker's number, and its requests; those with most of "
            "them, or the workers chosen above.",
            "short",
            top(_WHO, "worker {{worker}}"),
            kind="table",
        ),
    ),
)

SPREAD = Row(
    "How evenly the load lies",
    (
        Panel(
            "Workers by requests",
            "How many workers have how many requests. One narrow band: even. One far above the "
            "rest: a hot spot.",
            "short",
            bands(_REQUESTS, ("0", "1", "2", "4", "8", "16", "32", "64", "128", "256")),
            kind="heatmap",
            alert="WarmrouteHotSpot",
        ),
        Panel(
            "Workers by prefill queued",
            "How many workers have how many seconds of prompts to compute.",
            "s",
            bands(QUEUE_S, ("0", "0.05", "0.1", "0.25", "0.5", "1", "2", "4", "8", "16")),
            kind="heatmap",
            alert="WarmrouteHotSpot",
        ),
        Panel(
            "Workers by KV in use",
            "How many workers have how much of their KV memory held by requests.",
            "percentunit",
            bands(_KV, ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1")),
            kind="heatmap",
        ),
    ),
)

LOAD = Row(
    "Load, the workers with most of it",
    (
        Panel(
            "Requests by worker",
            "Sent to the worker by this router and not finished.",
            "short",
            per_worker("warmroute_worker_requests"),
        ),
        Panel(
            "Before their first token",
            "Of these, requests that have not begun to answer.",
            "short",
            per_worker("warmroute_worker_waiting_requests"),
        ),
        Panel(
            "Queued prefill",
            "Uncached prompt tokens that the worker has yet to compute. One worker far above the "
            "others: a hot spot.",
            "suffix: tokens",
            per_worker("warmroute_worker_queued_prefill_tokens"),
            alert="WarmrouteHotSpot",
        ),
        Panel(
            "Share of requests",
            "Each worker's share of all answers; answers that failed count too.",
            "percentunit",
            top(
                f"{REPLIES_BY_WORKER} / on () group_left () {rate('warmroute_replies_total')}",
                "worker {{worker}}",
            ),
            maximum=1.0,
        ),
        Panel(
            "Context",
            "KV tokens of requests past their first token: what decoding reads in every step.",
            "suffix: tokens",
            per_worker("warmroute_worker_context_tokens"),
        ),
        Panel(
            "KV in use by worker",
            "Share of the worker's KV memory: as it reported, and what was sent there since.",
            "percentunit",
            top(_KV, "worker {{worker}}"),
        ),
        Panel(
            "Blocks held",
            "Cached blocks that the worker's events told of.",
            "suffix: blocks",
            per_worker("warmroute_worker_resident_blocks"),
            6,
        ),
        Panel(
            "Prefill speed, the slowest",
            "Prompt tokens a second, as measured on the worker's own answers.",
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
            "Time of one decode step, as measured on the worker's own streams.",
            "s",
            per_worker("warmroute_worker_step_seconds"),
            6,
        ),
        Panel(
            "Not from this router",
            "Requests that a worker reported beyond those sent by this router: other routers' and "
            "clients' own.",
            "short",
            per_worker("warmroute_worker_foreign_requests"),
            6,
        ),
    ),
)

TOLD = Row(
    "As the engines tell, all that Prometheus scrapes",
    (
        Panel(
            "In the batch and waiting",
            "Requests of all engines: running in batches, and not admitted yet.",
            "short",
            (
                (f"sum({metrics.gauges(metrics.RUNNING, _ALL_ENGINES)})", "in the batch"),
                (f"sum({metrics.gauges(metrics.WAITING, _ALL_ENGINES)})", "waiting"),
            ),
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "Why requests wait in warmroute-engine",
            "Request-steps spent waiting per second, by reason. Other engines do not tell it.",
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
            "Share of KV blocks held by requests: the fullest engine, the mean, the emptiest.",
            "percentunit",
            tuple(
                (f"{what}({metrics.gauges(metrics.KV_USAGE, _ALL_ENGINES)})", name)
                for what, name in (("max", "fullest"), ("avg", "mean"), ("min", "emptiest"))
            ),
            maximum=1.0,
        ),
        Panel(
            "Age of load reports",
            "How long ago the worker last told its load; the router believes its own count then.",
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
            "Workers that a source is believed to have. Empty where none is configured.",
            "short",
            ((selected("warmroute_discovery_workers"), "{{source}}"),),
            alert="WarmrouteDiscoveryDown",
        ),
        Panel(
            "Sources that can be read",
            "1: the source is read and has no trouble. 0: it cannot be read, or names nobody "
            "although it did; its workers are kept.",
            "short",
            ((selected("warmroute_discovery_up"), "{{source}}"),),
            kind="state-timeline",
            alert="WarmrouteDiscoveryDown",
            limits=(limit("WarmrouteDiscoveryDown", "== "),),
            says=("read", "not read"),
        ),
        Panel(
            "Comings and goings",
            "Workers that joined or left by a source; flaps: back soon after they were lost. Cut "
            "short: removed with requests, at the end of drain_s.",
            "suffix: per s",
            (
                (rate("warmroute_discovery_changes_total", by="change"), "{{change}}"),
                (rate("warmroute_drains_cut_short_total"), "cut short"),
            ),
            names=("joined", "left", "flaps", "cut short"),
        ),
        Panel(
            "What cannot be used",
            "Entries of sources that are no workers, workers that two sources name differently, "
            "and for how many seconds a source has been silent.",
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

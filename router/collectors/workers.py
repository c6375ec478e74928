"""Collectors of the workers and of the sources that list workers. Samples of large metric families
are made here, not by the library's `add_metric`, which takes five times as long. A thousand workers
have thirty thousand samples, and the router does nothing else while they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from router.core.core import RouterCore
from router.core.workers.columns import WorkerColumns
from router.core.workers.table import Worker
from router.fleet.manager import FleetManager, RoleKeeper
from router.fleet.member import Member, skipped_events
from router.fleet.sources import Discovery
from router.metrics.exposition import counter, counters, gauge, gauges
from router.request.worker_hits import WorkerHits

_GAUGES = {
    "warmroute_worker_requests": "Unfinished requests that this router sent to the worker",
    "warmroute_worker_waiting_requests": (
        "Unfinished requests that this router sent to the worker and that have no first token yet"
    ),
    "warmroute_worker_foreign_requests": (
        "Requests that the worker reports beyond those of this router"
    ),
    "warmroute_worker_queued_prefill_tokens": (
        "Uncached prompt tokens that the worker has not computed yet"
    ),
    "warmroute_worker_context_tokens": (
        "KV tokens of the worker's requests that have their first token"
    ),
    "warmroute_worker_kv_used_tokens": (
        "KV tokens in use: the worker's latest report, plus the tokens that the router sent since. "
        "The metric is absent if the worker reports no use"
    ),
    "warmroute_worker_kv_capacity_tokens": (
        "KV tokens that fit into the worker's cache, as reported or learned from evictions. The "
        "metric is absent while the capacity is unknown"
    ),
    "warmroute_worker_load_age_seconds": (
        "Time since the worker's latest load report. The router asks an idle worker every 2 s. The "
        "metric is absent before the first report"
    ),
    "warmroute_worker_prefill_tokens_per_second": "Measured prefill speed of the worker",
    "warmroute_worker_step_seconds": "Measured time of one decode step of the worker",
    "warmroute_worker_resident_blocks": (
        "Blocks in the worker's cache according to its KV events; 0 without events"
    ),
    "warmroute_worker_kv_known": (
        "1 if the router knows the worker's whole cache; 0 if the router knows a lower bound, or "
        "the worker has no KV events"
    ),
    "warmroute_worker_mirrored": (
        "1 while the router estimates the worker's cache (a mirror), because the worker's KV "
        "events are unusable. `/workers` says why"
    ),
    "warmroute_worker_hit_confidence": (
        "Share of the worker's expected hits that the router counts: 1, or less if the worker's "
        "answers report fewer cached tokens"
    ),
    "warmroute_worker_kv_backlog_batches": (
        "Batches of KV events that wait for missing earlier batches"
    ),
    "warmroute_worker_kv_parked_blocks": "Stored blocks that wait for their parent block",
}
_LAG = (
    "Age of the worker's latest KV events on arrival, by the worker's time stamp "
    "and the router's clock"
)
_OF_FEED = (
    *("malformed_frames", "replays", "snapshots", "failed_syncs"),
    *("failed_polls", "dropped_frames", "disconnects"),
)
_OF_STATE = (
    *("batches", "stored_blocks", "removed_blocks", "clears", "gaps", "restarts"),
    *("duplicates", "orphans", "dropped_batches", "overflows"),
)


def worker_metrics(core: RouterCore, fleet: FleetManager) -> Iterator[Metric]:
    """Yield the metrics of all workers."""
    lag = _per_worker("warmroute_worker_event_lag_seconds", _LAG)
    events = CounterMetricFamily(
        "warmroute_kv_events", "KV events of the worker, by kind", labels=["worker", "kind"]
    )
    skipped = CounterMetricFamily(
        "warmroute_worker_events_skipped",
        "KV events of the worker that changed nothing, by reason",
        labels=["worker", "reason"],
    )
    failures = CounterMetricFamily(
        "warmroute_worker_failures",
        "Failures blamed on the worker, by cause: a kind of error, `stalled` or `probe`",
        labels=["worker", "cause"],
    )
    transfers = CounterMetricFamily(
        "warmroute_worker_kv_transfer_faults",
        "Requests whose KV did not safely reach another worker, as the engine counts the "
        "requests: KV freed before a worker read it (`expired`), KV read after it was freed "
        "(`late`; the answer may be wrong), or KV not received (`failed`). Only workers with a "
        "group have this metric",
        labels=["worker", "fault"],
    )
    up = GaugeMetricFamily(
        "warmroute_worker_state",
        "1 for the present state of the worker",
        labels=["worker", "state"],
    )
    joined: list[Worker] = []
    for member in fleet.members.values():
        label = str(member.worker_id)
        worker = core.workers.get(member.worker_id)
        state = "joining" if worker is None else worker.shown_state
        up.add_metric([label, state], 1)
        for kind, count in _events(member, worker).items():
            labels = {"worker": label, "kind": kind}
            events.samples.append(Sample("warmroute_kv_events_total", labels, count))
        for why, count in skipped_events(member, worker).items():
            labels = {"worker": label, "reason": why}
            skipped.samples.append(Sample("warmroute_worker_events_skipped_total", labels, count))
        if member.recognized is not None and member.recognized.facts.group is not None:
            for fault, count in asdict(member.transfers).items():
                labels = {"worker": label, "fault": fault}
                name = "warmroute_worker_kv_transfer_faults_total"
                transfers.samples.append(Sample(name, labels, count))
        if member.feed is not None and member.feed.counters.lag_s is not None:
            lag.add_metric([label], member.feed.counters.lag_s)
        if worker is not None:
            joined.append(worker)
            for cause, count in worker.health.causes.items():
                failures.add_metric([label, cause], count)
    yield from _fleet_metrics(core, fleet)
    yield from (_info(fleet), up, failures, transfers, events, skipped, lag)
    yield from _gauges(joined, core.columns, fleet.now_s)


def _fleet_metrics(core: RouterCore, fleet: FleetManager) -> Iterator[Metric]:
    yield halves_missing_metric(core)
    yield panic_metric(core)
    yield counter(
        "warmroute_role_changes", "Workers that changed their role while they ran", fleet.turned
    )
    yield counter(
        "warmroute_paused_seconds",
        "Time for which the router's event loop stood still, in pauses of 50 ms and more",
        fleet.pauses.total_s,
    )
    yield gauge(
        "warmroute_refused_ranks",
        "Data-parallel ranks that did not become workers, because of `limits.ranks` or "
        "`limits.workers`",
        fleet.refused_ranks,
    )
    yield gauge(
        "warmroute_refused_models",
        "Models that workers list and that the router does not serve, because of `limits.models`",
        fleet.refused_models,
    )


def hit_metrics(core: RouterCore, fleet: FleetManager, hits: WorkerHits) -> Iterator[Metric]:
    """Yield the gauge of each worker's hit mode."""
    family = GaugeMetricFamily(
        "warmroute_worker_hit_mode",
        "1 for how exact the worker's expected hits are: `exact`, `degraded` or `approximate`. "
        "`cause` says why. The metric is absent while the worker is down",
        labels=["worker", "mode", "cause"],
    )
    for member in fleet.members.values():
        verdict = hits.of(member, core.workers.get(member.worker_id))
        if verdict is not None:
            family.add_metric([str(member.worker_id), verdict.mode, verdict.cause], 1)
    yield family


def panic_metric(core: RouterCore) -> Metric:
    """Return the gauge that shows for each base model whether most of its workers do not answer
    probes.
    """
    family = GaugeMetricFamily(
        "warmroute_panic",
        "1 while most workers of a base model do not answer. While the metric is 1, the router "
        "moves no request, and new requests may wait",
        labels=["model"],
    )
    panics = core.health.silences.panics
    for model in sorted({worker.facts.models[0] for worker in core.workers}):
        family.add_metric([model], model in panics)
    return family


def halves_missing_metric(core: RouterCore) -> Metric:
    """Return the gauge that counts the prefill and decode workers without a partner. The gauge is
    empty if each group has both roles.
    """
    family = GaugeMetricFamily(
        "warmroute_pool_half_missing",
        "Workers without a partner in disaggregation: no ready worker of their group "
        "`prefills`, or none `decodes`",
        labels=["model", "group", "missing"],
    )
    for model in core.workers.models():
        for half in core.workers.halves_missing(model):
            family.add_metric([model, half.group or "", half.missing], half.workers)
    return family


def role_metrics(keeper: RoleKeeper | None) -> Iterator[Metric]:
    """Yield the work in each role as `roles.follow` measures it. Yield nothing if `roles.follow` is
    off.
    """
    if keeper is None:
        return
    family = GaugeMetricFamily(
        "warmroute_role_work",
        "Average work of the group's requests in each role over `roles.window_s`, in number of "
        "workers. This metric needs `roles.follow`",
        labels=["group", "role"],
    )
    for group, (controller, _) in keeper.groups.items():
        family.add_metric([group, "prefill"], controller.prefill_work)
        family.add_metric([group, "decode"], controller.decode_work)
    yield family


def _gauges(workers: list[Worker], columns: WorkerColumns, now_s: float) -> Iterator[Metric]:
    """Yield each gauge with the values of all workers; unknown values are left out."""
    labels = [{"worker": str(worker.worker_id)} for worker in workers]
    values = _values(workers, columns, now_s)
    for (name, text), column in zip(_GAUGES.items(), values, strict=True):
        gauge = _per_worker(name, text)
        for label, value in zip(labels, column, strict=True):
            if math.isfinite(value):
                gauge.samples.append(Sample(name, label, value))
        yield gauge


def _info(fleet: FleetManager) -> Metric:
    """Return the gauge whose labels have a worker's URL, engine, role and revision, for
    dashboards.
    """
    info = GaugeMetricFamily(
        "warmroute_worker_info",
        "Always 1. The labels give the URL, engine, role and revision of each worker number",
        labels=["worker", "url", "engine", "role", "revision"],
    )
    for member in fleet.members.values():
        known, spec = member.recognized, member.spec
        url = spec.url if spec.rank is None else f"{spec.url}#{spec.rank}"
        kind, role = ("", "") if known is None else (known.kind, known.facts.role)
        revision = "" if known is None else known.facts.revision or ""
        info.add_metric([str(member.worker_id), url, kind, role, revision], 1)
    return info


def _values(workers: list[Worker], columns: WorkerColumns, now_s: float) -> tuple[list[float], ...]:
    """Return for each gauge, in the order of `_GAUGES`, the values of all workers; an unknown value
    is not finite.
    """
    slots = np.array([worker.slot for worker in workers], dtype=np.int64)
    queued = columns.queued_tokens(slots)
    kv = [worker.kv for worker in workers]
    arrays = (
        columns.requests[slots],
        columns.waiting[slots],
        columns.foreign_running[slots] + columns.foreign_waiting[slots],
        queued,
        columns.context_tokens[slots],
        columns.kv_used_tokens(slots),
        columns.kv_capacity_tokens[slots],
        now_s - columns.report_s[slots],
        columns.prefill_tokens_per_s[slots],
        columns.step_s[slots],
        np.array([one.resident_blocks for one in kv]),
        np.array([one.known for one in kv]),
        np.array([one.guessed is not None for one in kv]),
        columns.hit_confidence[slots],
        np.array([one.backlog_batches for one in kv]),
        np.array([one.parked_blocks for one in kv]),
    )
    return tuple(array.astype(np.float64).tolist() for array in arrays)


def _events(member: Member, worker: Worker | None) -> dict[str, int]:
    """Return the counts of a worker's KV events by kind."""
    counts: dict[str, int] = {}
    skipped = 0
    if member.feed is not None:
        counters = member.feed.counters
        counts = {kind: getattr(counters, kind) for kind in _OF_FEED}
        skipped = counters.skipped_events
    if worker is not None:
        of_state = worker.kv.counters
        counts |= {kind: getattr(of_state, kind) for kind in _OF_STATE}
        counts["skipped_events"] = of_state.skipped_events + skipped
    return counts


def _per_worker(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["worker"])


def discovery_metrics(discovery: Discovery, fleet: FleetManager) -> Iterator[Metric]:
    """Yield the metrics of sources of workers; the families are empty if there is no source."""
    sources, now_s, name = discovery.sources, fleet.now_s, "warmroute_discovery"
    yield gauges(
        f"{name}_up",
        "1 if the router can read the source of workers; 0 if the router cannot, or if the source "
        "suddenly lists no worker",
        "source",
        {key: 0 if one.trouble or not one.has_reported else 1 for key, one in sources.items()},
    )
    yield gauges(
        f"{name}_workers",
        "Workers that the router has from the source",
        "source",
        {key: discovery.count(one) for key, one in sources.items()},
    )
    yield gauges(
        f"{name}_refused_entries",
        "Entries of the source that the router cannot use",
        "source",
        {key: len(one.refused) for key, one in sources.items()},
    )
    yield gauges(
        f"{name}_silent_seconds",
        "Time since the source failed or listed no worker. After `discovery_grace_s` the router "
        "removes the source's workers that are down",
        "source",
        {key: one.silent_s(now_s) for key, one in sources.items()},
    )
    yield counters(
        f"{name}_changes",
        "Workers that the source added (`joined`), removed (`left`), or listed again soon after "
        "the removal (`flaps`)",
        "source change",
        {
            (key, change): getattr(one, change)
            for key, one in sources.items()
            for change in ("joined", "left", "flaps")
        },
    )
    yield gauge(
        f"{name}_conflicts",
        "Workers that two sources list with different options",
        discovery.conflicts,
    )
    yield counter(
        "warmroute_drains_cut_short",
        "Workers that were removed with unfinished requests, at the end of `drain_s`",
        fleet.cut_short,
    )

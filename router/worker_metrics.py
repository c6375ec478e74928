"""What Prometheus is told of each worker: its state, its load, its cache, its KV events."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.core.columns import WorkerColumns
from router.core.core import RouterCore
from router.core.workers import Worker
from router.fleet_io.manager import FleetManager
from router.fleet_io.member import Member

_GAUGES = {
    "warmroute_worker_requests": "Requests dispatched to a worker and unfinished",
    "warmroute_worker_queued_prefill_tokens": "Uncached prompt tokens a worker has yet to compute",
    "warmroute_worker_context_tokens": "KV tokens of requests past their first token",
    "warmroute_worker_prefill_tokens_per_second": "Calibrated prefill rate",
    "warmroute_worker_step_seconds": "Calibrated time of one decode step",
    "warmroute_worker_resident_blocks": "Blocks a worker is known to hold",
    "warmroute_worker_kv_known": "1 while no KV event of the worker is missing",
    "warmroute_worker_kv_backlog_batches": "Event batches that wait for missing ones before them",
    "warmroute_worker_kv_parked_blocks": "Stored blocks that wait for their parent",
}
_LAG = "Age of the latest live KV events when they came, by the worker's clock and ours"
_OF_FEED = (
    *("malformed_frames", "replays", "snapshots", "failed_syncs"),
    *("failed_polls", "dropped_frames"),
)
_OF_STATE = (
    *("batches", "stored_blocks", "removed_blocks", "clears", "gaps", "restarts"),
    *("duplicates", "orphans", "dropped_batches", "overflows"),
)


def worker_metrics(core: RouterCore, fleet: FleetManager) -> Iterator[Metric]:
    """All families of the workers, as of now."""
    gauges = {name: _per_worker(name, text) for name, text in _GAUGES.items()}
    lag = _per_worker("warmroute_worker_event_lag_seconds", _LAG)
    events = CounterMetricFamily(
        "warmroute_kv_events", "KV events of a worker, by kind", labels=["worker", "kind"]
    )
    up = GaugeMetricFamily(
        "warmroute_worker_state", "1 for the state a worker is in", labels=["worker", "state"]
    )
    for member in fleet.members.values():
        label = str(member.worker_id)
        worker = core.workers.get(member.worker_id)
        state = "joining" if worker is None else worker.shown_state(fleet.now_s)
        up.add_metric([label, state], 1)
        for kind, count in _events(member, worker).items():
            events.add_metric([label, kind], count)
        if member.feed is not None and member.feed.counters.lag_s is not None:
            lag.add_metric([label], member.feed.counters.lag_s)
        if worker is not None:
            values = _values(worker, core.columns)
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric([label], float(value))
    yield from (up, events, lag, *gauges.values())


def _values(worker: Worker, columns: WorkerColumns) -> tuple[float, ...]:
    """Of the gauges, in their order."""
    slot, kv = worker.slot, worker.kv
    return (
        columns.requests[slot],
        float(columns.queued_tokens(slice(slot, slot + 1))[0]),
        columns.context_tokens[slot],
        columns.prefill_tokens_per_s[slot],
        columns.step_s[slot],
        kv.resident_blocks,
        1 if kv.known else 0,
        kv.backlog_batches,
        kv.parked_blocks,
    )


def _events(member: Member, worker: Worker | None) -> dict[str, int]:
    """What was counted of its KV events, by kind."""
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

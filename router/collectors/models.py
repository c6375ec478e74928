"""The collector of requests by model, which autoscalers read. Every known model has a value from
the router's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric

from router.core.core import RouterCore
from router.metrics.exposition import counters, gauge, gauges
from router.waiting.queue import MODELS_COUNTED, OTHERS, WorkerWait


def model_metrics(core: RouterCore, waiting: WorkerWait) -> Iterator[Metric]:
    """Yield the metrics of each model. Every model has a series, because an autoscaler takes a
    missing series for 0 and would not start the first worker.
    """
    first = waiting.terms().models  # which scale to zero
    models = sorted(waiting.known.names(), key=lambda model: (model not in first, model))

    def of(count: Callable[[str], int]) -> Mapping[str, float]:
        rows: dict[str, float] = {model: count(model) for model in models[:MODELS_COUNTED]}
        if more := models[MODELS_COUNTED:]:
            rows[OTHERS] = sum(map(count, more))
        return rows

    yield gauges(
        "warmroute_waiting_requests",
        "Requests that wait at the router, for a first worker or for room at workers",
        "model",
        of(lambda model: waiting.waiting(model) + core.held.waiting(model)),
    )
    yield gauges(
        "warmroute_running_requests",
        "Unfinished requests at workers",
        "model",
        of(core.model_limits.requests),
    )
    yield gauges(
        "warmroute_ready_workers",
        "Workers that answer; 0 if the workers cannot serve a request because a role is missing",
        "model",
        of(waiting.ready_workers),
    )
    yield counters(
        "warmroute_incoming_requests",
        "Requests that arrived for a known model, including refused requests",
        "model",
        {**of(lambda model: 0), **waiting.requests},
    )
    yield counters(
        "warmroute_first_worker_waits",
        "Requests that waited for a first worker of their model, by end: `served`, "
        "`late` (after `waiting.wait_s` or the client's deadline), `refused` (no "
        "room, or the router stopped), `displaced` by more important requests, `left` "
        "by their clients",
        "end",
        waiting.ends,
    )
    yield gauge(
        "warmroute_first_worker_waiting_bytes",
        "Size of the bodies of requests that wait for a first worker",
        waiting.bytes,
    )
    yield gauge(
        "warmroute_models_to_wait_for",
        "Models in `waiting.models`, which may have no worker on purpose",
        len(waiting.terms().models),
    )

"""Metrics of followed sessions: how many, what waits for them, what they want of each worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from policies.contract import Standing
from router.core.core import RouterCore
from router.estimators.sessions import Sessions


def session_metrics(core: RouterCore) -> Iterator[Metric]:
    """The families, as of now; all 0 where sessions are not followed."""
    followed = core.following.sessions
    active, idle = (0, 0) if followed is None else followed.count()
    live = GaugeMetricFamily("warmroute_sessions", "Sessions followed", labels=["state"])
    live.add_metric(["active"], active)
    live.add_metric(["idle"], idle)
    yield live
    yield CounterMetricFamily(
        "warmroute_forgotten_sessions",
        "Sessions forgotten at the bound, before they were over",
        value=0 if followed is None else followed.crowded_out,
    )
    yield GaugeMetricFamily(
        "warmroute_session_blocks",
        "Blocks of sessions' prompts that are known",
        value=0 if followed is None else len(followed.owners),
    )
    yield CounterMetricFamily(
        "warmroute_evicted_session_blocks",
        "Blocks of sessions' prompts forgotten at the bound",
        value=0 if followed is None else followed.owners.evicted,
    )
    held = GaugeMetricFamily(
        "warmroute_held_sessions",
        "Requests waiting at the router, by the standing of their session",
        labels=["standing"],
    )
    waiting = core.held.standings()
    for standing in get_args(Standing):
        held.add_metric([standing], waiting[standing])
    yield held
    waits = HistogramMetricFamily(
        "warmroute_held_seconds",
        "From the arrival of a request that was held to the end of its wait at the router",
        labels=["standing"],
    )
    for standing, times in core.counters.held.items():
        waits.add_metric([standing], times.buckets(), times.sum_s)
    yield waits
    yield from _working_sets(core, followed)


def _working_sets(core: RouterCore, followed: Sessions | None) -> Iterator[Metric]:
    tokens = GaugeMetricFamily(
        "warmroute_worker_working_set_tokens",
        "KV tokens that sessions at home on a worker will want again",
        labels=["worker"],
    )
    seconds = GaugeMetricFamily(
        "warmroute_worker_working_set_seconds",
        "Prefill time of a worker to compute these again",
        labels=["worker"],
    )
    for worker in core.workers:
        wanted, work_s = 0.0, 0.0
        if followed is not None:
            slot = worker.slot
            wanted = core.following.wanted_tokens(slot)
            work_s = float(followed.sets.cold_work[slot] / core.columns.prefill_tokens_per_s[slot])
        tokens.add_metric([str(worker.worker_id)], wanted)
        # Rounding may leave the sum a hair below nothing until it is made anew.
        seconds.add_metric([str(worker.worker_id)], max(work_s, 0.0))
    yield from (tokens, seconds)

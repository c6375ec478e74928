"""Collectors of sessions, of the tokens that they want cached (working sets), and of the prompt
beginnings that they share (trunks).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from policies.contract import Standing
from router.core.core import RouterCore
from router.core.sessions.sessions import Sessions
from router.metrics.exposition import counter, gauge, gauges


def session_metrics(core: RouterCore) -> Iterator[Metric]:
    """Yield the metrics of sessions. All values are 0 if the router does not track sessions."""
    followed = core.session_tracking.sessions
    active, idle = (0, 0) if followed is None else followed.count()
    states = {"active": active, "idle": idle}
    yield gauges(
        "warmroute_sessions",
        "Sessions that the router tracks: `active` with an unfinished request, or `idle`",
        "state",
        states,
    )
    yield counter(
        "warmroute_forgotten_sessions",
        "Sessions that the router dropped at `limits.sessions` before they ended",
        0 if followed is None else followed.crowded_out,
    )
    yield gauge(
        "warmroute_session_blocks",
        "Blocks of the tracked sessions' prompts, at most `limits.session_blocks`",
        0 if followed is None else len(followed.owners),
    )
    yield counter(
        "warmroute_evicted_session_blocks",
        "Blocks of sessions' prompts that the router dropped at `limits.session_blocks`",
        0 if followed is None else followed.owners.evicted,
    )
    waiting = core.held.standings()
    yield gauges(
        "warmroute_held_sessions",
        "Requests that wait at the router now, by their session: `new`, `cold` (the session lost "
        "its cache) or `warm`",
        "standing",
        {standing: waiting[standing] for standing in get_args(Standing)},
    )
    waits = HistogramMetricFamily(
        "warmroute_held_seconds",
        "Time that a held request waited at the router, from its arrival until it was "
        "sent, refused or left by its client",
        labels=["standing"],
    )
    for standing, times in core.counters.held.items():
        waits.add_metric([standing], times.buckets(), times.sum_s)
    yield waits
    yield from _working_sets(core, followed)


def _working_sets(core: RouterCore, followed: Sessions | None) -> Iterator[Metric]:
    tokens = GaugeMetricFamily(
        "warmroute_worker_working_set_tokens",
        "KV tokens that the worker's sessions will want again, weighted by their "
        "probability to return",
        labels=["worker"],
    )
    seconds = GaugeMetricFamily(
        "warmroute_worker_working_set_seconds",
        "Prefill time that the worker needs to compute the private tokens of its working set again",
        labels=["worker"],
    )
    for worker in core.workers:
        wanted, work_s = 0.0, 0.0
        if followed is not None:
            slot = worker.slot
            wanted = core.session_tracking.wanted_tokens(slot)
            work_s = float(followed.sets.cold_work[slot] / core.columns.prefill_tokens_per_s[slot])
        tokens.add_metric([str(worker.worker_id)], wanted)
        # Rounding may leave the sum slightly below zero until it is computed again.
        seconds.add_metric([str(worker.worker_id)], max(work_s, 0.0))
    yield from (tokens, seconds)


_RANKS = 5  # series a family: trunks come and go, their ranks do not


def trunk_metrics(core: RouterCore) -> Iterator[Metric]:
    """Yield the metrics of trunks, which are prompt beginnings that sessions share. All values are
    0 if the router does not track sessions.
    """
    sessions = core.session_tracking.sessions
    trunks = None if sessions is None else sessions.trunks
    table = [] if trunks is None else trunks.table()
    yield gauge("warmroute_trunks", "Shared prefixes (trunks) that the router tracks", len(table))
    hot = sum(trunk.wanted_copies > 1 for trunk in table)
    yield gauge("warmroute_hot_trunks", "Trunks that more than one worker should hold", hot)
    yield counter(
        "warmroute_replaced_trunks",
        "Trunks that the router dropped for another trunk, because the router tracks at most 256",
        0 if trunks is None else trunks.replaced,
    )
    demand, copies, wanted = (
        GaugeMetricFamily(
            f"warmroute_trunk_{name}", f"{text}, by the trunk's rank in demand", labels=["rank"]
        )
        for name, text in (
            ("demand", "Seconds of work per second that requests with a trunk bring"),
            ("copies", "Workers that hold a trunk"),
            ("wanted_copies", "Workers that should hold a trunk"),
        )
    )
    for rank in range(1, _RANKS + 1):
        trunk = table[rank - 1] if rank <= len(table) else None
        demand.add_metric([str(rank)], 0.0 if trunk is None else trunk.demand)
        held = 0 if trunk is None else core.caches.copies(trunk.last_hash)
        copies.add_metric([str(rank)], held)
        wanted.add_metric([str(rank)], 0 if trunk is None else trunk.wanted_copies)
    yield from (demand, copies, wanted)

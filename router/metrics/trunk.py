"""Metrics of trunks: how many, whether their copies suffice, and the few with most demand."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.core.core import RouterCore

_RANKS = 5  # series a family: trunks come and go, their ranks do not


def trunk_metrics(core: RouterCore) -> Iterator[Metric]:
    """The families, as of now; all 0 where sessions are not followed."""
    sessions = core.following.sessions
    trunks = None if sessions is None else sessions.trunks
    table = [] if trunks is None else trunks.table()
    yield GaugeMetricFamily("warmroute_trunks", "Shared heads of prompts kept", value=len(table))
    hot = sum(trunk.wanted_copies > 1 for trunk in table)
    yield GaugeMetricFamily(
        "warmroute_hot_trunks", "Of these, more than one worker should hold", value=hot
    )
    yield CounterMetricFamily(
        "warmroute_replaced_trunks",
        "Shared heads that gave way to another at the bound",
        value=0 if trunks is None else trunks.replaced,
    )
    demand, copies, wanted = (
        GaugeMetricFamily(f"warmroute_trunk_{name}", f"{text}, by rank in demand", labels=["rank"])
        for name, text in (
            ("demand", "Seconds of work per second that prompts of a trunk bring"),
            ("copies", "Workers that hold a trunk"),
            ("wanted_copies", "Workers that should hold a trunk"),
        )
    )
    for rank in range(1, _RANKS + 1):
        trunk = table[rank - 1] if rank <= len(table) else None
        demand.add_metric([str(rank)], 0.0 if trunk is None else trunk.demand)
        held = 0 if trunk is None else core.roster.copies(trunk.last_hash)
        copies.add_metric([str(rank)], held)
        wanted.add_metric([str(rank)], 0 if trunk is None else trunk.wanted_copies)
    yield from (demand, copies, wanted)

"""What the doors of both ports tell Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.http.door.door import Door
from router.http.door.refusals import GIVEN_UP, REFUSALS


class DoorCollector(Collector):
    """Reads the doors' own counts. Lifetime: process."""

    def __init__(self, doors: Mapping[str, Door]) -> None:
        self._doors = doors

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        refusals = CounterMetricFamily(
            "warmroute_door_refusals",
            "Requests and connections turned away before they were read, by port and reason",
            labels=["port", "reason"],
        )
        connections = GaugeMetricFamily(
            "warmroute_door_connections", "Open connections of clients", labels=["port"]
        )
        held = GaugeMetricFamily(
            "warmroute_door_arriving_bytes",
            "Memory of requests that have not arrived in whole",
            labels=["port"],
        )
        for port, door in self._doors.items():
            for reason in (*REFUSALS, *GIVEN_UP):
                refusals.add_metric([port, reason], door.refusals[reason])
            connections.add_metric([port], door.connections)
            held.add_metric([port], door.held_bytes)
        yield from (refusals, connections, held)

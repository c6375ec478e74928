"""What Prometheus hears of the sources that name workers."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.discovery.discovery import Discovery
from router.fleet_io.manager import FleetManager


class DiscoveryCollector(Collector):
    """Reads what is believed as of now. Lifetime: process."""

    def __init__(self, discovery: Discovery, fleet: FleetManager) -> None:
        self._discovery = discovery
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """All families; those of sources are empty where there is none."""
        up = _gauge("up", "1 while a source that names workers can be read and has no trouble")
        workers = _gauge("workers", "Workers that a source is believed to have")
        refused = _gauge("refused_entries", "Entries of a source that cannot be used, as of now")
        silent = _gauge("silent_seconds", "For how long a source has named nobody, after it did")
        changes = CounterMetricFamily(
            "warmroute_discovery_changes",
            "Workers that a source named or lost, and returns soon after a loss",
            labels=["source", "change"],
        )
        now_s = self._fleet.now_s
        for name, believed in self._discovery.sources.items():
            up.add_metric([name], 0 if believed.trouble or not believed.heard else 1)
            workers.add_metric([name], self._discovery.count(believed))
            refused.add_metric([name], len(believed.refused))
            silent.add_metric([name], believed.silent_s(now_s))
            for change in ("joined", "left", "flaps"):
                changes.add_metric([name, change], getattr(believed, change))
        yield from (up, workers, refused, silent, changes)
        yield GaugeMetricFamily(
            "warmroute_discovery_conflicts",
            "Workers that a second source names otherwise, or that cannot be told apart",
            value=self._discovery.conflicts,
        )
        yield CounterMetricFamily(
            "warmroute_drains_cut_short",
            "Workers removed with requests, at the end of drain_s",
            value=self._fleet.cut_short,
        )


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"warmroute_discovery_{name}", text, labels=["source"])

"""What Prometheus hears of the file in which the workers' caches are saved."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.state.keeper import StateKeeper


class StateCollector(Collector):
    """Reads the keeper's own counts; zero where nothing is saved. Lifetime: process."""

    def __init__(self, keeper: StateKeeper | None) -> None:
        self._keeper = keeper

    def collect(self) -> Iterable[Metric]:
        """The three families."""
        keeper = self._keeper
        saves = CounterMetricFamily(
            "warmroute_kv_state_saves",
            "Savings of the workers' caches, written or failed",
            labels=["result"],
        )
        saves.add_metric(["written"], 0 if keeper is None else keeper.saves)
        saves.add_metric(["failed"], 0 if keeper is None else keeper.failed_saves)
        yield saves
        yield GaugeMetricFamily(
            "warmroute_kv_state_bytes",
            "Size of the file of saved caches, as last written",
            value=0 if keeper is None else keeper.size_bytes,
        )
        yield GaugeMetricFamily(
            "warmroute_kv_state_age_seconds",
            "Time since the workers' caches were last saved, or since the start",
            value=0 if keeper is None else keeper.age_s,
        )

"""What Prometheus is told of tracing."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.tracing.export import Exporter


class TracingCollector(Collector):
    """Zero where tracing is off. Lifetime: process."""

    def __init__(self, exporter: Exporter | None) -> None:
        self._exporter = exporter

    def collect(self) -> Iterable[Metric]:
        """The one family."""
        traces = CounterMetricFamily(
            "warmroute_traces",
            "Sampled requests whose spans the collector took, or that were lost",
            labels=["result"],
        )
        exporter = self._exporter
        traces.add_metric(["exported"], 0 if exporter is None else exporter.exported)
        traces.add_metric(["lost"], 0 if exporter is None else exporter.lost)
        yield traces

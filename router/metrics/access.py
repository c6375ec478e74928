"""What Prometheus is told of the access log."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.record.access_log import AccessLog


class AccessCollector(Collector):
    """Zero where there is no log. Lifetime: process."""

    def __init__(self, log: AccessLog | None) -> None:
        self._log = log

    def collect(self) -> Iterable[Metric]:
        """The one family."""
        lines = CounterMetricFamily(
            "warmroute_access_log_lines",
            "Lines of the access log, written or lost for want of room",
            labels=["result"],
        )
        written = 0 if self._log is None else self._log.written
        lines.add_metric(["written"], written)
        lines.add_metric(["lost"], 0 if self._log is None else self._log.lost)
        yield lines

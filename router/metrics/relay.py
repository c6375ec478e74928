"""Which way replies went, for Prometheus."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.http.relay.reply import Outcome


class RelayMetrics(Collector):
    """Lifetime: process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: Counter[str] = Counter({"": 0})  # by why; "": native
        registry.register(self)

    def outcome(self, outcome: Outcome) -> None:
        """A dispatch ended; one without a reply has gone no way."""
        if outcome.status is not None:
            self._counts[outcome.why_python] += 1

    def collect(self) -> list[Metric]:
        """The family, as of now."""
        family = CounterMetricFamily(
            "warmroute_relayed_requests",
            "Workers' replies, by what carried them, and why where that was Python",
            labels=["path", "why"],
        )
        for why, count in self._counts.items():
            family.add_metric(["python" if why else "native", why], count)
        return [family]

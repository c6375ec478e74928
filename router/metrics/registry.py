"""The registry of a router's metrics: those of requests, and those that other parts register."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from router.metrics.exposition import Families
from router.metrics.requests import RequestMetrics


class RouterMetrics:
    """Metrics recorded as things happen, and the collectors read at a scrape. Lifetime: process."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.requests = RequestMetrics(registry)
        self._registry = registry

    def register(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add the metrics that another part's function returns at each scrape."""
        self._registry.register(Families(read))

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Return all families with their present values."""
        return self._registry.collect()

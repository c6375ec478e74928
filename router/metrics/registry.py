"""The registry of a router's metrics: those of requests, and whatever else is registered."""

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
        """Show what another part counts, too."""
        self._registry.register(Families(read))

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        return self._registry.collect()

"""The registry of a router's metrics: those of requests, and those that other parts register."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from router.metrics.exposition import Families
from router.metrics.requests import RequestMetrics


class RouterMetrics:
    """The router's metrics: those recorded when events happen, and those read at each scrape.
    Lifetime: process.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.requests = RequestMetrics(registry)
        self._registry = registry

    def register(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add a function of another part that returns its metrics at each scrape."""
        self._registry.register(Families(read))

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Return all families with their present values."""
        return self._registry.collect()

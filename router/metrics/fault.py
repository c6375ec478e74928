"""Requests that failed before a worker was chosen, by whose fault that was."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

_OURS = 500


class FaultMetrics:
    """Lifetime: process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.clients = 0  # all of them, for who does not ask by status
        self.ours = 0
        self._clients = Counter(
            "warmroute_client_errors",
            "Requests refused as the client's fault, by status",
            ["status"],
            registry=registry,
        )
        self._ours = Counter(
            "warmroute_internal_errors",
            "Requests that a defect of the router ended: its log says which",
            registry=registry,
        )

    def faulty(self, status: int) -> None:
        """Count one by the status of its answer: 500 is the router's own, all else the client's."""
        if status == _OURS:
            self.ours += 1
            self._ours.inc()
        else:
            self.clients += 1
            self._clients.labels(str(status)).inc()

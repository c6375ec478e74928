"""Metrics of the policy in use: its faults, and whether it is suspended."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.core.guard import FAULT_KINDS, PolicyGuard


def policy_metrics(guard: PolicyGuard) -> Iterator[Metric]:
    """The families, as of now."""
    faults = CounterMetricFamily(
        "warmroute_policy_faults", "Faults of policies, by kind", labels=["policy", "kind"]
    )
    counts: dict[tuple[str, str], int] = {(guard.policy.name, kind): 0 for kind in FAULT_KINDS}
    counts.update(guard.faults)
    for labels, count in counts.items():
        faults.add_metric(labels, count)
    yield faults
    suspended = GaugeMetricFamily(
        "warmroute_policy_suspended", "1 while the fallback decides in the policy's place"
    )
    suspended.add_metric([], float(guard.suspension.active))
    yield suspended

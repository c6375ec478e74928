"""Metrics by tenant: few series, whoever comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.keys.tenant_counts import OTHERS, TenantCounts, TenantRow


class TenantCollector(Collector):
    """Reads what is counted by tenant. Lifetime: process."""

    def __init__(self, counts: TenantCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        rows = {**self._counts.rows, OTHERS: self._counts.others}
        yield from _counted(rows)


def _counted(rows: dict[str, TenantRow]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "warmroute_tenant_requests", "Requests of a tenant that were begun", labels=["tenant"]
    )
    refused = CounterMetricFamily(
        "warmroute_tenant_refusals",
        "Requests of a tenant that were refused, by reason",
        labels=["tenant", "reason"],
    )
    tokens = CounterMetricFamily(
        "warmroute_tenant_tokens",
        "Tokens of a tenant's answered requests: of the prompt, of the answer",
        labels=["tenant", "of"],
    )
    for tenant, row in rows.items():
        requests.add_metric([tenant], row.requests)
        tokens.add_metric([tenant, "prompt"], row.prompt_tokens)
        tokens.add_metric([tenant, "answer"], row.answer_tokens)
        # One that is always there, so that its first increase is seen.
        for code, count in {"rate_limit_exceeded": 0, **row.refused}.items():
            refused.add_metric([tenant, code], count)
    yield from (requests, refused, tokens)

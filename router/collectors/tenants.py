"""Collectors of tenants and of held requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from policies.facts import Arrival
from router.core.core import RouterCore
from router.keys.tenant_counts import OTHERS, TenantCounts
from router.metrics.exposition import counters, gauge, gauges


def tenant_metrics(counts: TenantCounts) -> Iterator[Metric]:
    """Yield the requests, refusals and tokens of the busiest tenants, and the sums of all other
    tenants.
    """
    rows = {**counts.rows, OTHERS: counts.others}
    yield counters(
        "warmroute_tenant_requests",
        "Requests that the tenant began. `(others)` stands for all tenants except the 50 busiest",
        "tenant",
        {tenant: row.requests for tenant, row in rows.items()},
    )
    yield counters(
        "warmroute_tenant_refusals",
        "Requests of the tenant that were refused, by error code",
        "tenant reason",
        {
            (tenant, code): count
            for tenant, row in rows.items()
            # A series that exists from the start, so that its first increase is seen.
            for code, count in {"rate_limit_exceeded": 0, **row.refused}.items()
        },
    )
    yield counters(
        "warmroute_tenant_tokens",
        "Tokens of the tenant's answered requests, of the `prompt` or the `answer`",
        "tenant of",
        {
            (tenant, of): count
            for tenant, row in rows.items()
            for of, count in (("prompt", row.prompt_tokens), ("answer", row.answer_tokens))
        },
    )


_TENANTS_SHOWN = 20
_PRIORITIES_SHOWN = 10


def held_metrics(core: RouterCore, now_s: float) -> Iterator[Metric]:
    """Yield the held requests by tenant and by priority, and their predicted waits."""
    held = list(core.held)
    yield gauges(
        "warmroute_held_by_priority",
        "Requests that wait at the router now, for each of the 10 most frequent priorities and "
        "for all `(others)`",
        "priority",
        _greatest(Counter(str(one.arrival.priority) for one in held), _PRIORITIES_SHOWN),
    )
    yield gauges(
        "warmroute_held_by_tenant",
        "Requests that wait at the router now, for each of the 20 tenants with the most and for "
        "all `(others)`",
        "tenant",
        _greatest(Counter(one.arrival.tenant or "" for one in held), _TENANTS_SHOWN),
    )
    oldest_s = max((now_s - one.arrival.now_s for one in held), default=0.0)
    yield gauge(
        "warmroute_held_oldest_seconds",
        "Longest wait so far of a request that waits at the router now",
        max(oldest_s, 0.0),
    )
    waits_s = [  # of a newcomer of priority 0 and no tenant
        core.admission.wait_s(Arrival(now_s, -1, model, 1, {}), now_s)
        for model in core.workers.models()
    ]
    yield gauge(
        "warmroute_predicted_wait_seconds",
        "Predicted wait of a request of priority 0 that arrives now, for the model "
        "with the longest wait",
        max(waits_s, default=0.0),
    )
    yield gauges(
        "warmroute_queued_prompt_tokens",
        "Prompt tokens that are not computed yet, of requests that are `sent` to workers, and of "
        "`held` requests",
        "where",
        {"sent": core.admission.drain.queued_tokens, "held": core.held.tokens},
    )


def _greatest(counts: Counter[str], shown: int) -> dict[str, float]:
    """Return the `shown` greatest counts by name, and the sum of all others, so that there are few
    series.
    """
    named = {value: count for value, count in counts.most_common(shown) if value != OTHERS}
    return {**named, OTHERS: counts.total() - sum(named.values())}

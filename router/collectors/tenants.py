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
    """Requests, refusals and tokens of the busiest tenants, and of all others together."""
    rows = {**counts.rows, OTHERS: counts.others}
    yield counters(
        "warmroute_tenant_requests",
        "Requests of a tenant that were begun",
        "tenant",
        {tenant: row.requests for tenant, row in rows.items()},
    )
    yield counters(
        "warmroute_tenant_refusals",
        "Requests of a tenant that were refused, by reason",
        "tenant reason",
        {
            (tenant, code): count
            for tenant, row in rows.items()
            # One that is always there, so that its first increase is seen.
            for code, count in {"rate_limit_exceeded": 0, **row.refused}.items()
        },
    )
    yield counters(
        "warmroute_tenant_tokens",
        "Tokens of a tenant's answered requests: of the prompt, of the answer",
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
    """Held requests by tenant and priority, and their predicted waits."""
    held = list(core.held)
    yield gauges(
        "warmroute_held_by_priority",
        "Requests waiting at the router, by priority",
        "priority",
        _greatest(Counter(str(one.arrival.priority) for one in held), _PRIORITIES_SHOWN),
    )
    yield gauges(
        "warmroute_held_by_tenant",
        "Requests waiting at the router, by tenant",
        "tenant",
        _greatest(Counter(one.arrival.tenant or "" for one in held), _TENANTS_SHOWN),
    )
    oldest_s = max((now_s - one.arrival.now_s for one in held), default=0.0)
    yield gauge(
        "warmroute_held_oldest_seconds",
        "How long the oldest of those that wait has waited",
        max(oldest_s, 0.0),
    )
    waits_s = [  # of a newcomer of priority 0 and no tenant
        core.admission.wait_s(Arrival(now_s, -1, model, 1, {}), now_s)
        for model in core.workers.models()
    ]
    yield gauge(
        "warmroute_predicted_wait_seconds",
        "Until a worker would compute a request that came now, the longest of all models",
        max(waits_s, default=0.0),
    )
    yield gauges(
        "warmroute_queued_prompt_tokens",
        "Tokens of prompts that are to be computed: of requests sent, of requests that wait",
        "where",
        {"sent": core.admission.drain.queued_tokens, "held": core.held.tokens},
    )


def _greatest(counts: Counter[str], shown: int) -> dict[str, float]:
    """The greatest by name, all others together: few series, whoever waits."""
    named = {value: count for value, count in counts.most_common(shown) if value != OTHERS}
    return {**named, OTHERS: counts.total() - sum(named.values())}

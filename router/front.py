"""What serves clients, wired the same way in every process of a router."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_network

from router.config.schema import Config
from router.http.attempts import Attempts
from router.http.desk import Desk
from router.http.inference import Inference
from router.http.migration.migrations import Migrations
from router.http.prompts import PromptReader
from router.http.tenants import Tenants
from router.http.visits import Visits
from router.keys.ring import KeyRing
from router.keys.tenant_counts import TenantCounts
from router.metrics.migration import MigrationMetrics
from router.record.access_log import AccessLog
from router.terms import Standing, attempt_terms, inference_terms, migration_terms
from router.tracing.export import Exporter
from router.tracing.tracer import Tracer, below_of


def inference(
    desk: Desk,
    prompts: PromptReader,
    config: Callable[[], Config],
    keys: KeyRing | None,
    counts: TenantCounts,
    told: MigrationMetrics,
    access: AccessLog | None = None,
    traces: Exporter | None = None,
) -> Inference:
    """The handler of inference paths. `config` gives the configuration of the moment, `keys` are
    clients' API keys; what happens is counted in `counts` and `told`, and logged in `access` and
    told to `traces`.
    """
    first = config()
    peers = tuple(ip_network(peer) for peer in first.trusted_peers)
    tenants = Tenants(keys, first.tenant_header, peers)
    attempts = Attempts(
        Standing(attempt_terms, config),
        keep_authorization=not tenants.asks_keys,
        migrations=Migrations(desk, told, Standing(migration_terms, config)),
    )
    tracer = None
    if traces is not None:
        below = Standing(lambda now: below_of(now.tracing.sample), config)
        tracer = Tracer(traces, below, desk.clock)
    visits = None
    if access is not None or tracer is not None:
        visits = Visits(access, desk.clock, None if tracer is None else tracer.end)
    terms = Standing(inference_terms, config)
    return Inference(desk, prompts, tenants, attempts, terms, counts, visits, tracer)

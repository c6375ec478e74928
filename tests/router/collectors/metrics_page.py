"""Makes the page docs/reference/metrics.md from the router's metrics; run as a program, it writes
the page.

python -m tests.router.collectors.metrics_page docs/reference/metrics.md

The page is made from a router's registry: names, labels, types and help texts.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from prometheus_client.metrics_core import Metric

from router.assembly import Router
from router.collectors.ports_and_logs import server_metrics
from router.collectors.workers import role_metrics
from router.fleet.manager import RoleKeeper
from router.server.server import HttpServer
from router.settings.schema import Config
from tests.router.server_support import LIMITS, TERMS

INTRODUCTION = """\
# Metrics

*`python -m tests.router.collectors.metrics_page docs/reference/metrics.md` makes this page from
the router's registry.*

`GET /metrics` on the admin port shows these metrics to Prometheus. A metric of a feature that is
off is 0, or has no series. Other pages have the metrics of
[several routers](../replicas.md#several-replicas), of [our engine](../engine.md) and of
[its KV transfers](../engine.md#kv-transfers).
"""
HEAD = "| metric | labels | type | meaning |\n|---|---|---|---|\n"
KINDS_HEAD = """
`warmroute_kv_events_total` counts by `kind`:

| `kind` | counts |
|---|---|
"""
KINDS = (
    (
        "`batches`, `stored_blocks`, `removed_blocks`, `clears`",
        "received batches; blocks stored and removed; events that clear the cache",
    ),
    (
        "`gaps`, `replays`, `snapshots`, `failed_syncs`",
        "missed events; replays and snapshots that recovered missed events; failed attempts to "
        "recover events",
    ),
    ("`restarts`", "restarts of the engine"),
    (
        "`malformed_frames`, `skipped_events`",
        "messages that cannot be read; [events that the router cannot use]"
        "(wire.md#what-is-accepted-from-vllm-sglang-and-tensorrt-llm)",
    ),
    ("`failed_polls`", "polls for events that the worker did not answer"),
    ("`disconnects`", "lost connections to the publisher of the events"),
    (
        "`dropped_batches`, `dropped_frames`",
        "batches beyond `limits.events_backlog_batches` during a replay; messages beyond this "
        "limit before the router reads them",
    ),
    (
        "`overflows`",
        "times that the events reported more blocks than fit into the worker's cache, and the "
        "router forgot all blocks of the worker",
    ),
    (
        "`orphans`, `duplicates`",
        "blocks that waited for their parent; batches that the router knew already",
    ),
)
# Title, what stands below it, and a pattern of the names without `warmroute_`: the first that fits.
SECTIONS = (
    (
        "The HTTP server",
        "[errors.md](errors.md) lists the reasons why the server refuses requests; "
        "[server.md](server.md) explains how answers return to clients.",
        "server_|relayed_",
    ),
    ("Waiting requests", "", "held_|holds|predicted_|queued_|reserved_"),
    (
        "Requests by model",
        "Autoscalers read the metrics of this section. Each [known "
        "model](../scale-to-zero.md#known-models) has its series from the start. Beyond 1,000 "
        "models the label is `(others)`.",
        "waiting_|running_|ready_|incoming_|first_worker|models_to",
    ),
    ("Tenants", "Tenants are the owners of [API keys](keys.md).", "tenant_"),
    ("The policy", "", "policy_"),
    (
        "Tokens",
        "See [the check](tokens.md#the-check), [renderers](tokens.md#renderers) and "
        "[the attribution line](../agents.md#claude-code).",
        "template_|attribution_|token|render",
    ),
    (
        "Sessions and trunks",
        "The metrics of sessions and trunks are 0 if the policy does not use sessions. `/trunks` "
        "shows [trunks](admin.md#what-do-prompts-share) in full.",
        "sessions|session_|forgotten_|evicted_|trunk|hot_|replaced_|worker_working",
    ),
    (
        "Disaggregation",
        "See [disaggregation](../disaggregation.md).",
        "legs|prefill_leg|kv_transfer|worker_kv_transfer|pool_half|role_",
    ),
    ("Migration", "See [failures](failures.md#migration-streams-that-go-on-elsewhere).", "migrat"),
    ("Names", "See [names and canaries](../names.md).", "name_"),
    ("Discovery", "See [discovery](discovery.md).", "discovery_|drains_"),
    ("The endpoint picker", "See [gateway](../gateway.md).", "picker_"),
    ("Logs and traces", "See [logs and traces](logs.md).", "access_|request_log|traces"),
    (
        "Caches",
        "See [how exact expected hits are](../operations.md#how-exact-are-expected-hits) and "
        "[wrong reports from engines](failures.md#wrong-reports-from-engines).",
        "index_|kv_|mirror|worker_kv_(known|backlog|parked)|worker_(events|event|resident|mirrored"
        "|hit)",
    ),
    (
        "Workers",
        "See the [states](admin.md#workers) of a worker, and [failures](failures.md).",
        "worker_|replies|ejections|panic|refused_",
    ),
    ("Requests", "", "(?!former|paused)"),
    ("The router", "See [hot restart](../deployment.md#hot-restart).", ""),
)
FIRST = ("Requests",)  # of the page, though its pattern is tried late


def families() -> list[Metric]:
    """Return all metric families of a router that shares nothing with others, in the order of a
    scrape.
    """

    async def made() -> list[Metric]:
        server = HttpServer(LIMITS, TERMS, (), time.monotonic)
        async with aiohttp.ClientSession() as http:
            router = Router(Config(), http)
            try:
                return [*server_metrics(server), *router.metrics.collect(), *role_families(router)]
            finally:
                await router.aclose()

    return asyncio.run(made())


def role_families(router: Router) -> Iterator[Metric]:
    """Yield the metric family of the option `roles.follow`, which is off by default."""
    core = router.dispatcher.core
    return role_metrics(RoleKeeper(router.fleet, core, router.config.roles))


def section_of(name: str) -> str:
    """Return the title of the section that a metric belongs to."""
    short = name.removeprefix("warmroute_")
    return next(title for title, _, names in SECTIONS if re.match(names, short))


def row(family: Metric) -> str:
    """Return the line of the metrics table that describes one family."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in vars(family)["_labelnames"])
    return f"| `{name}` | {labels} | {family.type} | {family.documentation} |\n"


def page() -> str:
    """Return the whole text of docs/reference/metrics.md."""
    rows: dict[str, list[str]] = {title: [] for title, _, _ in SECTIONS}
    for family in families():
        rows[section_of(family.name)].append(row(family))
    text = INTRODUCTION
    for title, note, _ in sorted(SECTIONS, key=lambda one: one[0] not in FIRST):
        text += f"\n## {title}\n\n" + (f"{note}\n\n" if note else "")
        text += HEAD + "".join(rows[title])
        if title == "Caches":
            text += KINDS_HEAD + "".join(f"| {kind} | {counts} |\n" for kind, counts in KINDS)
    return text


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")

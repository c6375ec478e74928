"""The collector of the decision core, and the registration of the collectors that every router has.

`router/assembly.py` registers the others. Counts that the core keeps anyway are read from it at
scrape time; only times are recorded as they happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client.metrics_core import Metric

from policies.facts import Role
from router.collectors.ports_and_logs import log_metrics, state_metrics, token_metrics
from router.collectors.sessions import session_metrics, trunk_metrics
from router.collectors.workers import worker_metrics
from router.core.core import RouterCore
from router.core.placement.guard import FAULT_KINDS, PolicyGuard
from router.core.workers.kv_events import TIERS
from router.fleet.manager import FleetManager
from router.metrics.exposition import counter, counters, gauge, gauges
from router.metrics.registry import RouterMetrics
from router.metrics.requests import Replies
from router.record.request_log import RequestLog
from router.request.prompts import PromptReader
from router.tokens.check import TokenCheck

if TYPE_CHECKING:
    from router.restart.saved_caches import StateKeeper


def router_metrics(
    core: RouterCore,
    fleet: FleetManager,
    prompts: PromptReader,
    request_log: RequestLog | None = None,
    check: TokenCheck | None = None,
    keeper: StateKeeper | None = None,
) -> RouterMetrics:
    """Return the metrics of requests, with those of the core, its log, its saved caches and its
    tokens.
    """
    metrics = RouterMetrics()
    replies = metrics.requests.replies
    metrics.register(lambda: _core_metrics(core, fleet, prompts, replies))
    metrics.register(lambda: log_metrics("request", request_log))
    metrics.register(lambda: state_metrics(keeper))
    if check is not None:
        metrics.register(lambda: token_metrics(check, prompts.memo))
    return metrics


def policy_metrics(guard: PolicyGuard) -> Iterator[Metric]:
    """Yield the metrics of the policy."""
    counts: dict[tuple[str, ...], float] = {(guard.policy.name, kind): 0 for kind in FAULT_KINDS}
    yield counters(
        "warmroute_policy_faults",
        "Faults of policies, by kind",
        "policy kind",
        counts | guard.faults,
    )
    yield gauge(
        "warmroute_policy_suspended",
        "1 while the fallback decides in the policy's place",
        guard.suspension.active,
    )


def _core_metrics(
    core: RouterCore, fleet: FleetManager, prompts: PromptReader, replies: Replies
) -> Iterator[Metric]:
    """Yield the core's own counts."""
    yield from _decisions(core, prompts)
    yield from _requests(core)
    yield from _index(core)
    yield from _mirrors(core)
    yield from session_metrics(core)
    yield from trunk_metrics(core)
    yield from worker_metrics(core, fleet)
    yield _worker_replies(replies, fleet)


def _decisions(core: RouterCore, prompts: PromptReader) -> Iterator[Metric]:
    counted = core.counters
    yield counters(
        "warmroute_decisions",
        "Dispatches by policy and reason",
        "policy reason",
        counted.decisions,
    )
    yield counters(
        "warmroute_legs",
        "What workers were to do of requests: both, prefill or decode",
        "leg",
        {leg: counted.legs[leg] for leg in get_args(Role)},
    )
    yield gauge(
        "warmroute_kv_transfer_tokens_per_second",
        "How fast KV goes from one worker to another, as learned",
        core.disaggregation.tokens_per_s,
    )
    yield counters(
        "warmroute_rejections", "Requests turned away, by reason", "code", counted.rejections
    )
    yield counter(
        "warmroute_expected_hit_tokens",
        "Prompt tokens expected to be cached on the chosen worker",
        counted.expected_hit_tokens,
    )
    yield counter("warmroute_prompt_tokens", "Prompt tokens dispatched", counted.prompt_tokens)
    yield counter("warmroute_holds", "Requests held at the router", counted.holds)
    yield counter(
        "warmroute_reserved_workers",
        "Times that a worker was kept for a request that others had passed",
        core.chooser.reservations.begun,
    )
    yield counter("warmroute_retries", "Dispatches tried again elsewhere", counted.retries)
    yield counter("warmroute_ejections", "Workers ejected", counted.ejections)
    yield counter(
        "warmroute_ejections_withheld",
        "Failures that would have ejected a worker, with too many of its pool ejected already",
        counted.ejections_withheld,
    )
    yield counter(
        "warmroute_retries_refused",
        "Failed requests not tried again, for too many are (retries.budget_...)",
        counted.retries_refused,
    )
    yield from policy_metrics(core.guard)
    yield counter(
        "warmroute_template_refusals",
        "Prompts that the tokenizer or its chat template refused, placed approximately",
        prompts.template_refusals,
    )
    lines = prompts.attributions
    yield counters(
        "warmroute_attribution_lines",
        "Requests with a client's attribution line, beside the request before of their session",
        "line",
        {"same": lines.same, "changed": lines.changed},
    )


def _requests(core: RouterCore) -> Iterator[Metric]:
    yield gauge(
        "warmroute_inflight_requests", "Accepted, unfinished requests", core.inflight_requests
    )
    yield gauge("warmroute_held_requests", "Requests waiting at the router", core.held_requests)


def _index(core: RouterCore) -> Iterator[Metric]:
    index = core.caches.index
    yield gauge("warmroute_index_blocks", "Distinct blocks in the index", len(index))
    yield gauge("warmroute_index_bytes", "Memory of the index", index.memory_bytes)
    yield counter("warmroute_index_evicted_blocks", "Blocks forgotten at the bound", index.evicted)
    workers = list(core.workers)
    yield gauges(
        "warmroute_index_held_blocks",
        "Blocks held by workers, by tier",
        "tier",
        {
            name: sum(index.held(worker.slot, tier) for worker in workers)
            for tier, name in enumerate(TIERS)
        },
    )
    yield gauge(
        "warmroute_kv_names_bytes",
        "Memory of the names that engines give their blocks, and of blocks without a parent",
        sum(worker.kv.blocks.memory_bytes for worker in workers),
    )


def _mirrors(core: RouterCore) -> Iterator[Metric]:
    mirrors = core.caches.mirrors
    yield gauge(
        "warmroute_mirrored_blocks",
        "Blocks believed to be in caches without events",
        len(mirrors),
    )
    yield gauge("warmroute_mirror_bytes", "Memory of the mirrors", mirrors.memory_bytes)
    yield counters(
        "warmroute_mirror_corrections",
        "Answers that proved a mirror wrong: fewer or more blocks were there",
        "found",
        {"fewer": mirrors.counters.fewer, "more": mirrors.counters.more},
    )


def _worker_replies(replies: Replies, fleet: FleetManager) -> Metric:
    """Return the replies by worker. A worker that left takes its series along, or they would grow
    with every change.
    """
    for gone in replies.keys() - fleet.members.keys():
        del replies[gone]
    return counters(
        "warmroute_replies",
        "Replies of workers, by worker, status and kind of error",
        "worker status error",
        {
            (str(worker_id), status, kind): count
            for worker_id, counts in replies.items()
            for (status, kind), count in counts.items()
        },
    )

"""The collector of the decision core, and the registration of the collectors that every router has.
`router/assembly.py` registers the others. Counts that the core keeps for itself are read at scrape
time; only durations are recorded when they happen.
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
    """Return the metrics of requests, and those of the core, the request log, saved caches and
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
    """Yield the metrics of the policy that chooses workers."""
    counts: dict[tuple[str, ...], float] = {(guard.policy.name, kind): 0 for kind in FAULT_KINDS}
    yield counters(
        "warmroute_policy_faults",
        "Faults of a policy's code: an exception (`raised`), a cost that is no number "
        "(`nan`), costs of a wrong shape or type (`shape`), a slow answer (`slow`), "
        "or faulty terms (`terms`)",
        "policy kind",
        counts | guard.faults,
    )
    yield gauge(
        "warmroute_policy_suspended",
        "1 while the fallback policy decides, because the policy keeps failing",
        guard.suspension.active,
    )


def _core_metrics(
    core: RouterCore, fleet: FleetManager, prompts: PromptReader, replies: Replies
) -> Iterator[Metric]:
    """Yield the metrics of the decision core."""
    yield from _decisions(core)
    yield from _failures(core)
    yield from _prompts(prompts)
    yield from _requests(core)
    yield from _index(core)
    yield from _mirrors(core)
    yield from session_metrics(core)
    yield from trunk_metrics(core)
    yield from worker_metrics(core, fleet)
    yield _worker_replies(replies, fleet)


def _decisions(core: RouterCore) -> Iterator[Metric]:
    counted = core.counters
    yield counters(
        "warmroute_decisions",
        "Requests sent to a worker, retries included, by the policy that chose the worker and the "
        "reason",
        "policy reason",
        counted.decisions,
    )
    yield counters(
        "warmroute_legs",
        "Requests sent to a worker, by the worker's part: `both`, `prefill` or `decode`",
        "leg",
        {leg: counted.legs[leg] for leg in get_args(Role)},
    )
    yield gauge(
        "warmroute_kv_transfer_tokens_per_second",
        "Measured speed of KV transfers between workers; 200,000 before the first transfer",
        core.disaggregation.tokens_per_s,
    )
    yield counters(
        "warmroute_rejections",
        "Requests that the router refused, by error code",
        "code",
        counted.rejections,
    )
    yield counter(
        "warmroute_expected_hit_tokens",
        "Prompt tokens that the router expected in the chosen worker's cache",
        counted.expected_hit_tokens,
    )
    yield counter(
        "warmroute_prompt_tokens",
        "Prompt tokens of all requests sent to workers",
        counted.prompt_tokens,
    )
    yield counter("warmroute_holds", "Requests that began to wait at the router", counted.holds)
    yield counter(
        "warmroute_reserved_workers",
        "Times that the router reserved a worker for a request that had waited for 20 s and that "
        "eight other requests had overtaken",
        core.chooser.reservations.begun,
    )


def _failures(core: RouterCore) -> Iterator[Metric]:
    counted = core.counters
    yield counter(
        "warmroute_retries", "Requests sent to another worker after a failure", counted.retries
    )
    yield counter("warmroute_ejections", "Failures that ejected a worker", counted.ejections)
    yield counter(
        "warmroute_ejections_withheld",
        "Failures that did not eject a worker, because too many workers of its pool "
        "were ejected already",
        counted.ejections_withheld,
    )
    yield counter(
        "warmroute_retries_refused",
        "Failed requests that were not retried, because the retry budget was used up",
        counted.retries_refused,
    )
    yield from policy_metrics(core.guard)


def _prompts(prompts: PromptReader) -> Iterator[Metric]:
    yield counter(
        "warmroute_template_refusals",
        "Prompts that the router's tokenizer or chat template refused",
        prompts.template_refusals,
    )
    lines = prompts.attributions
    yield counters(
        "warmroute_attribution_lines",
        "Requests with Claude Code's attribution line: the `same` line as the session's request "
        "before, or a `changed` line, after which some engines reuse nothing of their cache",
        "line",
        {"same": lines.same, "changed": lines.changed},
    )


def _requests(core: RouterCore) -> Iterator[Metric]:
    yield gauge(
        "warmroute_inflight_requests",
        "Requests that the router has accepted and not finished, including held requests",
        core.inflight_requests,
    )
    yield gauge(
        "warmroute_held_requests", "Requests that wait at the router now", core.held_requests
    )


def _index(core: RouterCore) -> Iterator[Metric]:
    index = core.caches.index
    yield gauge("warmroute_index_blocks", "Distinct blocks in the prefix index", len(index))
    yield gauge("warmroute_index_bytes", "Memory of the prefix index", index.memory_bytes)
    yield counter(
        "warmroute_index_evicted_blocks",
        "Blocks that the prefix index dropped at `limits.index_entries` or `limits.index_bytes`",
        index.evicted,
    )
    workers = list(core.workers)
    yield gauges(
        "warmroute_index_held_blocks",
        "Blocks in the workers' caches by tier: `gpu`, `host` or `disk`. A block "
        "counts once for each worker",
        "tier",
        {
            name: sum(index.held(worker.slot, tier) for worker in workers)
            for tier, name in enumerate(TIERS)
        },
    )
    yield gauge(
        "warmroute_kv_names_bytes",
        "Memory of the engines' names of blocks, and of blocks that wait for their parent",
        sum(worker.kv.blocks.memory_bytes for worker in workers),
    )


def _mirrors(core: RouterCore) -> Iterator[Metric]:
    mirrors = core.caches.mirrors
    yield gauge(
        "warmroute_mirrored_blocks",
        "Distinct blocks in the estimated caches (mirrors) of workers without KV events",
        len(mirrors),
    )
    yield gauge("warmroute_mirror_bytes", "Memory of the estimated caches", mirrors.memory_bytes)
    yield counters(
        "warmroute_mirror_corrections",
        "Answers that corrected an estimated cache: the worker had `fewer` or `more` blocks",
        "found",
        {"fewer": mirrors.counters.fewer, "more": mirrors.counters.more},
    )


def _worker_replies(replies: Replies, fleet: FleetManager) -> Metric:
    """Return the number of replies by worker. The series of a worker that left are dropped;
    otherwise the number of series would grow with every change of the fleet.
    """
    for gone in replies.keys() - fleet.members.keys():
        del replies[gone]
    return counters(
        "warmroute_replies",
        "Answers of workers by status and kind of error. `error` is empty for a good "
        "answer, `status` if there was no answer. The series end when the worker "
        "leaves",
        "worker status error",
        {
            (str(worker_id), status, kind): count
            for worker_id, counts in replies.items()
            for (status, kind), count in counts.items()
        },
    )

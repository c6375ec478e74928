"""All that the router tells Prometheus, registered in one place.

Counts that the core keeps anyway are read from it at scrape time; only times are recorded as
they happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.core.core import RouterCore
from router.core.guard import FAULT_KINDS, PolicyGuard
from router.core.kv_events import TIERS
from router.fleet.manager import FleetManager
from router.metrics.requests import MigrationMetrics, Replies, RequestMetrics, TokenCollector
from router.metrics.tenants import session_metrics, trunk_metrics
from router.metrics.workers import worker_metrics
from router.record.request_log import RequestLog
from router.request.prompts import PromptReader, TokenCheck
from router.restart.saved_caches import StateKeeper


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


class StateCollector(Collector):
    """Reads the keeper's own counts; zero where nothing is saved. Lifetime: process."""

    def __init__(self, keeper: StateKeeper | None) -> None:
        self._keeper = keeper

    def collect(self) -> Iterable[Metric]:
        """The three families."""
        keeper = self._keeper
        saves = CounterMetricFamily(
            "warmroute_kv_state_saves",
            "Savings of the workers' caches, written or failed",
            labels=["result"],
        )
        saves.add_metric(["written"], 0 if keeper is None else keeper.saves)
        saves.add_metric(["failed"], 0 if keeper is None else keeper.failed_saves)
        yield saves
        yield GaugeMetricFamily(
            "warmroute_kv_state_bytes",
            "Size of the file of saved caches, as last written",
            value=0 if keeper is None else keeper.size_bytes,
        )
        yield GaugeMetricFamily(
            "warmroute_kv_state_age_seconds",
            "Time since the workers' caches were last saved, or since the start",
            value=0 if keeper is None else keeper.age_s,
        )


class RouterMetrics:
    """Lifetime: process; a worker's own counts leave with it."""

    def __init__(
        self,
        core: RouterCore,
        fleet: FleetManager,
        prompts: PromptReader,
        request_log: RequestLog | None = None,
        check: TokenCheck | None = None,
        keeper: StateKeeper | None = None,
    ) -> None:
        registry = CollectorRegistry()
        self.requests = RequestMetrics(registry)
        registry.register(_CoreCollector(core, fleet, prompts, self.requests.replies))
        registry.register(_LogCollector(request_log))
        registry.register(StateCollector(keeper))
        if check is not None:
            registry.register(TokenCollector(check, prompts.encoder))
        self._registry = registry
        self.migrations = MigrationMetrics(registry)

    def register(self, collector: Collector) -> None:
        """Show what another part counts, too."""
        self._registry.register(collector)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        return self._registry.collect()


class _CoreCollector(Collector):
    """Reads the core's own counts. Lifetime: process."""

    def __init__(
        self, core: RouterCore, fleet: FleetManager, prompts: PromptReader, replies: Replies
    ) -> None:
        self._core = core
        self._fleet = fleet
        self._prompts = prompts
        self._replies = replies

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        yield from self._decisions()
        yield from self._requests()
        yield from self._index()
        yield from self._mirrors()
        yield from session_metrics(self._core)
        yield from trunk_metrics(self._core)
        yield from worker_metrics(self._core, self._fleet)
        yield self._worker_replies()

    def _decisions(self) -> Iterator[Metric]:
        counters = self._core.counters
        decisions = CounterMetricFamily(
            "warmroute_decisions", "Dispatches by policy and reason", labels=["policy", "reason"]
        )
        for labels, count in counters.decisions.items():
            decisions.add_metric(labels, count)
        yield decisions
        rejections = CounterMetricFamily(
            "warmroute_rejections", "Requests turned away, by reason", labels=["code"]
        )
        for code, count in counters.rejections.items():
            rejections.add_metric([code], count)
        yield rejections
        yield _counter(
            "warmroute_expected_hit_tokens",
            "Prompt tokens expected to be cached on the chosen worker",
            counters.expected_hit_tokens,
        )
        yield _counter(
            "warmroute_prompt_tokens", "Prompt tokens dispatched", counters.prompt_tokens
        )
        yield _counter("warmroute_holds", "Requests held at the router", counters.holds)
        yield _counter(
            "warmroute_reserved_workers",
            "Times that a worker was kept for a request that others had passed",
            self._core.chooser.reservations.begun,
        )
        yield _counter("warmroute_retries", "Dispatches tried again elsewhere", counters.retries)
        yield _counter("warmroute_ejections", "Workers ejected", counters.ejections)
        yield _counter(
            "warmroute_ejections_withheld",
            "Failures that would have ejected a worker, with too many of its pool ejected already",
            counters.ejections_withheld,
        )
        yield _counter(
            "warmroute_retries_refused",
            "Failed requests not tried again, for too many are (retries.budget_...)",
            counters.retries_refused,
        )
        yield from policy_metrics(self._core.guard)
        yield _counter(
            "warmroute_template_refusals",
            "Prompts that the tokenizer or its chat template refused, placed approximately",
            self._prompts.template_refusals,
        )

    def _requests(self) -> Iterator[Metric]:
        core = self._core
        yield _gauge(
            "warmroute_inflight_requests", "Accepted, unfinished requests", core.inflight_requests
        )
        yield _gauge(
            "warmroute_held_requests", "Requests waiting at the router", core.held_requests
        )

    def _index(self) -> Iterator[Metric]:
        index = self._core.roster.index
        yield _gauge("warmroute_index_blocks", "Distinct blocks in the index", len(index))
        yield _gauge("warmroute_index_bytes", "Memory of the index", index.memory_bytes)
        yield _counter(
            "warmroute_index_evicted_blocks", "Blocks forgotten at the bound", index.evicted
        )
        workers = list(self._core.workers)
        held = GaugeMetricFamily(
            "warmroute_index_held_blocks", "Blocks held by workers, by tier", labels=["tier"]
        )
        for tier, name in enumerate(TIERS):
            held.add_metric([name], sum(index.held(worker.slot, tier) for worker in workers))
        yield held
        yield _gauge(
            "warmroute_kv_names_bytes",
            "Memory of the names that engines give their blocks, and of blocks without a parent",
            sum(worker.kv.blocks.memory_bytes for worker in workers),
        )

    def _mirrors(self) -> Iterator[Metric]:
        mirrors = self._core.roster.mirrors
        yield _gauge(
            "warmroute_mirrored_blocks",
            "Blocks believed to be in caches without events",
            len(mirrors),
        )
        yield _gauge("warmroute_mirror_bytes", "Memory of the mirrors", mirrors.memory_bytes)
        corrections = CounterMetricFamily(
            "warmroute_mirror_corrections",
            "Answers that proved a mirror wrong: fewer or more blocks were there",
            labels=["found"],
        )
        corrections.add_metric(["fewer"], mirrors.counters.fewer)
        corrections.add_metric(["more"], mirrors.counters.more)
        yield corrections

    def _worker_replies(self) -> Metric:
        """A worker that left takes its series along, or they would grow with every change."""
        for gone in self._replies.keys() - self._fleet.members.keys():
            del self._replies[gone]
        replies = CounterMetricFamily(
            "warmroute_replies",
            "Replies of workers, by worker, status and kind of error",
            labels=["worker", "status", "error"],
        )
        for worker_id, counts in self._replies.items():
            for (status, kind), count in counts.items():
                replies.add_metric([str(worker_id), status, kind], count)
        return replies


class _LogCollector(Collector):
    """Reads the request log's counts; zero where there is no log. Lifetime: process."""

    def __init__(self, request_log: RequestLog | None) -> None:
        self._log = request_log

    def collect(self) -> Iterable[Metric]:
        """The one family."""
        lines = CounterMetricFamily(
            "warmroute_request_log_lines",
            "Lines of the request log, written or lost for want of room",
            labels=["result"],
        )
        lines.add_metric(["written"], 0 if self._log is None else self._log.lines)
        lines.add_metric(["lost"], 0 if self._log is None else self._log.lost)
        yield lines


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)

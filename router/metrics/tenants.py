"""Metrics of who wants what: tenants, held requests, sessions, trunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from policies.contract import Standing
from policies.facts import Arrival
from router.core.core import RouterCore
from router.estimators.sessions import Sessions
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


_TENANTS_SHOWN = 20
_PRIORITIES_SHOWN = 10


class HeldCollector(Collector):
    """Lifetime: process. Looks at the core when it is scraped."""

    def __init__(self, core: RouterCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        now_s = self._clock()
        held = list(self._core.held)
        priorities = Counter(str(pending.arrival.priority) for pending in held)
        yield _shared(
            "warmroute_held_by_priority",
            "Requests waiting at the router, by priority",
            "priority",
            priorities,
            _PRIORITIES_SHOWN,
        )
        tenants = Counter(pending.arrival.tenant or "" for pending in held)
        yield _shared(
            "warmroute_held_by_tenant",
            "Requests waiting at the router, by tenant",
            "tenant",
            tenants,
            _TENANTS_SHOWN,
        )
        oldest_s = max((now_s - pending.arrival.now_s for pending in held), default=0.0)
        yield GaugeMetricFamily(
            "warmroute_held_oldest_seconds",
            "How long the oldest of those that wait has waited",
            value=max(oldest_s, 0.0),
        )
        yield from self._predicted(now_s)
        drain = self._core.admission.drain
        queued = GaugeMetricFamily(
            "warmroute_queued_prompt_tokens",
            "Tokens of prompts that are to be computed: of requests sent, of requests that wait",
            labels=["where"],
        )
        queued.add_metric(["sent"], drain.queued_tokens)
        queued.add_metric(["held"], self._core.held.tokens)
        yield queued

    def _predicted(self, now_s: float) -> Iterator[Metric]:
        """For a newcomer of priority 0 and no tenant."""
        predicted = GaugeMetricFamily(
            "warmroute_predicted_wait_seconds",
            "Until a worker would compute a request that came now, the longest of all models",
        )
        waits_s = [
            self._core.admission.wait_s(Arrival(now_s, -1, model, 1, {}), now_s)
            for model in self._core.workers.models()
        ]
        predicted.add_metric([], max(waits_s, default=0.0))
        yield predicted


def _shared(name: str, text: str, label: str, counts: Counter[str], shown: int) -> Metric:
    """The greatest by name, all others together: few series, whoever waits."""
    family = GaugeMetricFamily(name, text, labels=[label])
    named = [(value, count) for value, count in counts.most_common(shown) if value != OTHERS]
    for value, count in named:
        family.add_metric([value], count)
    family.add_metric([OTHERS], counts.total() - sum(count for _, count in named))
    return family


def session_metrics(core: RouterCore) -> Iterator[Metric]:
    """The families, as of now; all 0 where sessions are not followed."""
    followed = core.session_tracking.sessions
    active, idle = (0, 0) if followed is None else followed.count()
    live = GaugeMetricFamily("warmroute_sessions", "Sessions followed", labels=["state"])
    live.add_metric(["active"], active)
    live.add_metric(["idle"], idle)
    yield live
    yield CounterMetricFamily(
        "warmroute_forgotten_sessions",
        "Sessions forgotten at the bound, before they were over",
        value=0 if followed is None else followed.crowded_out,
    )
    yield GaugeMetricFamily(
        "warmroute_session_blocks",
        "Blocks of sessions' prompts that are known",
        value=0 if followed is None else len(followed.owners),
    )
    yield CounterMetricFamily(
        "warmroute_evicted_session_blocks",
        "Blocks of sessions' prompts forgotten at the bound",
        value=0 if followed is None else followed.owners.evicted,
    )
    held = GaugeMetricFamily(
        "warmroute_held_sessions",
        "Requests waiting at the router, by the standing of their session",
        labels=["standing"],
    )
    waiting = core.held.standings()
    for standing in get_args(Standing):
        held.add_metric([standing], waiting[standing])
    yield held
    waits = HistogramMetricFamily(
        "warmroute_held_seconds",
        "From the arrival of a request that was held to the end of its wait at the router",
        labels=["standing"],
    )
    for standing, times in core.counters.held.items():
        waits.add_metric([standing], times.buckets(), times.sum_s)
    yield waits
    yield from _working_sets(core, followed)


def _working_sets(core: RouterCore, followed: Sessions | None) -> Iterator[Metric]:
    tokens = GaugeMetricFamily(
        "warmroute_worker_working_set_tokens",
        "KV tokens that sessions at home on a worker will want again",
        labels=["worker"],
    )
    seconds = GaugeMetricFamily(
        "warmroute_worker_working_set_seconds",
        "Prefill time of a worker to compute these again",
        labels=["worker"],
    )
    for worker in core.workers:
        wanted, work_s = 0.0, 0.0
        if followed is not None:
            slot = worker.slot
            wanted = core.session_tracking.wanted_tokens(slot)
            work_s = float(followed.sets.cold_work[slot] / core.columns.prefill_tokens_per_s[slot])
        tokens.add_metric([str(worker.worker_id)], wanted)
        # Rounding may leave the sum a hair below nothing until it is made anew.
        seconds.add_metric([str(worker.worker_id)], max(work_s, 0.0))
    yield from (tokens, seconds)


_RANKS = 5  # series a family: trunks come and go, their ranks do not


def trunk_metrics(core: RouterCore) -> Iterator[Metric]:
    """The families, as of now; all 0 where sessions are not followed."""
    sessions = core.session_tracking.sessions
    trunks = None if sessions is None else sessions.trunks
    table = [] if trunks is None else trunks.table()
    yield GaugeMetricFamily("warmroute_trunks", "Shared heads of prompts kept", value=len(table))
    hot = sum(trunk.wanted_copies > 1 for trunk in table)
    yield GaugeMetricFamily(
        "warmroute_hot_trunks", "Of these, more than one worker should hold", value=hot
    )
    yield CounterMetricFamily(
        "warmroute_replaced_trunks",
        "Shared heads that gave way to another at the bound",
        value=0 if trunks is None else trunks.replaced,
    )
    demand, copies, wanted = (
        GaugeMetricFamily(f"warmroute_trunk_{name}", f"{text}, by rank in demand", labels=["rank"])
        for name, text in (
            ("demand", "Seconds of work per second that prompts of a trunk bring"),
            ("copies", "Workers that hold a trunk"),
            ("wanted_copies", "Workers that should hold a trunk"),
        )
    )
    for rank in range(1, _RANKS + 1):
        trunk = table[rank - 1] if rank <= len(table) else None
        demand.add_metric([str(rank)], 0.0 if trunk is None else trunk.demand)
        held = 0 if trunk is None else core.roster.copies(trunk.last_hash)
        copies.add_metric([str(rank)], held)
        wanted.add_metric([str(rank)], 0 if trunk is None else trunk.wanted_copies)
    yield from (demand, copies, wanted)

"""Metrics of what waits at the router: whose it is, how important, how long it has and will."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from policies.facts import Arrival
from router.core.core import RouterCore
from router.keys.tenant_counts import OTHERS

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

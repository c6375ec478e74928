"""Metrics of requests: answers, errors, relaying, hit tokens and latencies."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from policies.facts import Arrival
from router.http.errors import WorkerError
from router.http.reply import Outcome
from router.metrics.exposition import counter, counters
from router.record.request_record import DEADLINE

Replies = dict[int, Counted[tuple[str, str]]]  # worker -> (status, kind of error) -> replies

_ROUTER_ERROR = 500
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_GAP_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)


# These counters need no lock: they are updated and read on the event loop's thread only.


class PlainHistogram(Collector):
    """A histogram without labels, used only on the event loop's thread. Lifetime: process."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        """Make an empty histogram.

        `bounds` are the upper bounds, ascending, of all buckets except the last, which has none.
        """
        self._name = name
        self._text = text
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose upper bound is at least the value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def totals(self) -> tuple[tuple[int, ...], float]:
        """Return the number of values in each bucket, not cumulative, the unbounded bucket last;
        and the sum of all values.
        """
        return tuple(self._counts), self._sum

    def collect(self) -> Iterable[Metric]:
        """Yield the histogram as a metric family, whose bucket counts are cumulative."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((str(floatToGoString(bound)), total))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._name, self._text, buckets, sum_value=self._sum)


class RequestMetrics(Collector):
    """Counts the outcomes of requests and of their attempts at workers. Lifetime: process; a
    worker's counts are dropped when it leaves.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.replies: Replies = {}
        self.worker_errors = 0  # replies that failed by a worker's fault
        self.busy_replies = 0  # replies of workers that had no room
        self.client_errors: Counted[str] = Counted()  # by status
        self.internal_errors = 0
        self._relayed: Counted[str] = Counted({"": 0})  # by reason; "": native relay
        self.reported_hit_tokens = 0
        self.reported_prompt_tokens = 0
        self.ttft = PlainHistogram(
            "warmroute_time_to_first_token_seconds",
            "Time from a request's arrival to the first byte of its streamed answer",
            _SECONDS,
        )
        self._prefill = PlainHistogram(
            "warmroute_prefill_leg_seconds",
            "Time of a disaggregated request's prefill leg, from its dispatch to the end "
            "of its answer",
            _SECONDS,
        )
        self._gap = PlainHistogram(
            "warmroute_inter_token_seconds",
            "Mean time between the events of a streamed answer",
            _GAP_SECONDS,
        )
        self._e2e = PlainHistogram(
            "warmroute_request_seconds",
            "Time from a request's arrival to the last byte of its complete answer",
            _SECONDS,
        )
        registry.register(self)

    def faulty(self, status: int) -> None:
        """Count an answered error by its status: 500 is the router's fault, all others the
        client's.
        """
        if status == _ROUTER_ERROR:
            self.internal_errors += 1
        else:
            self.client_errors[str(status)] += 1

    def prefilled(self, worker_id: int, outcome: Outcome, now_s: float) -> None:
        """Count a prefill step at a worker that ended well; the client has received nothing yet."""
        self._prefill.observe(max(now_s - outcome.started_s, 0.0))
        if (replies := self.replies.get(worker_id)) is None:
            replies = self.replies[worker_id] = Counted()
        replies[str(outcome.status), ""] += 1
        self._reported(outcome)

    def _reported(self, outcome: Outcome) -> None:
        usage = outcome.usage
        if usage and usage.cached_tokens is not None and usage.prompt_tokens is not None:
            self.reported_hit_tokens += usage.cached_tokens
            self.reported_prompt_tokens += usage.prompt_tokens

    def count_attempt(
        self, arrival: Arrival, worker_id: int, outcome: Outcome, now_s: float
    ) -> None:
        """Count an attempt that has ended. If its answer was complete, record its latencies."""
        error, kind = outcome.error, ""
        if isinstance(error, WorkerError):
            if error.kind == "out_of_files":  # it reached no worker, so only its refusal counts
                return
            kind = error.kind
            if kind == "busy":
                self.busy_replies += 1
            else:
                self.worker_errors += 1
        elif error is not None:
            kind = DEADLINE if error.code == DEADLINE else "client"
        status = "" if outcome.status is None else str(outcome.status)
        if (replies := self.replies.get(worker_id)) is None:
            replies = self.replies[worker_id] = Counted()
        replies[status, kind] += 1
        if outcome.status is not None:  # otherwise no answer was relayed
            self._relayed[outcome.fallback_reason] += 1
        self._reported(outcome)
        if error is not None or not outcome.answers:
            return
        self._e2e.observe(max(now_s - arrival.now_s, 0.0))
        if arrival.stream and outcome.first_byte_s is not None:
            begun_s = outcome.first_token_s or outcome.first_byte_s
            self.ttft.observe(max(begun_s - arrival.now_s, 0.0))
            if outcome.last_byte_s is not None and outcome.events > 1:
                span_s = outcome.last_byte_s - begun_s
                self._gap.observe(max(span_s, 0.0) / (outcome.events - 1))

    def collect(self) -> Iterable[Metric]:
        """Yield all families with their present values."""
        yield counters(
            "warmroute_relayed_requests",
            "Answers of workers by the path that carried the answer: `native`, or `python` for "
            "the reason in `why`",
            "path why",
            {("python" if why else "native", why): count for why, count in self._relayed.items()},
        )
        yield counters(
            "warmroute_client_errors",
            "Requests refused for a mistake of the client, before a worker was chosen, by "
            "HTTP status",
            "status",
            self.client_errors,
        )
        yield counter(
            "warmroute_internal_errors",
            "Requests that a defect of the router ended. The log has `failed to answer` "
            "and the stack",
            self.internal_errors,
        )
        yield counter(
            "warmroute_reported_hit_tokens",
            "Prompt tokens that workers reported as cached",
            self.reported_hit_tokens,
        )
        yield counter(
            "warmroute_reported_prompt_tokens",
            "Prompt tokens of the answers that report cached tokens",
            self.reported_prompt_tokens,
        )
        for plain in (self.ttft, self._prefill, self._gap, self._e2e):
            yield from plain.collect()

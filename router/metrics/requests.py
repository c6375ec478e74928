"""Metrics of requests on their way: server, faults, relay, migration, tokens, logs, traces."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.wire.memo import MemoEncoder
from policies.facts import Arrival
from router.http.errors import WorkerError
from router.http.messages import GIVEN_UP, REFUSALS
from router.http.reply import Outcome
from router.metrics.exposition import counter, counters, gauge, gauges
from router.record.log_files import QueuedLog
from router.record.request_record import DEADLINE
from router.request.prompts import TokenCheck
from router.server.server import HttpServer

Replies = dict[int, Counted[tuple[str, str]]]  # worker -> (status, kind of error) -> replies

_OURS = 500
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_GAP_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)


# Cheap counters: whoever counts and whoever reads are on the same thread, the event loop's.


class PlainHistogram(Collector):
    """Lifetime: process."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        """`bounds`: the upper ones of all buckets but the last, which has none; ascending."""
        self._name = name
        self._text = text
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value into the first bucket whose bound is not below it."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def totals(self) -> tuple[tuple[int, ...], float]:
        """How many values fell into each bucket alone, the last without a bound; their sum."""
        return tuple(self._counts), self._sum

    def collect(self) -> Iterable[Metric]:
        """The one family; a bucket holds those before it, too."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((str(floatToGoString(bound)), total))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._name, self._text, buckets, sum_value=self._sum)


class RequestMetrics(Collector):
    """What became of requests and their attempts.

    Lifetime: process; a worker's counts leave with it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.replies: Replies = {}
        self.worker_errors = 0  # replies that failed by a worker's fault
        self.busy_replies = 0  # of workers that had no room just then
        self.client_errors: Counted[str] = Counted()  # by status
        self.internal_errors = 0
        self._relayed: Counted[str] = Counted({"": 0})  # by why not natively
        self.reported_hit_tokens = 0
        self.reported_prompt_tokens = 0
        self.ttft = PlainHistogram(
            "warmroute_time_to_first_token_seconds",
            "From a request's arrival to the first byte of its streamed answer",
            _SECONDS,
        )
        self._prefill = PlainHistogram(
            "warmroute_prefill_leg_seconds",
            "The first of two legs, from its dispatch to the end of its answer",
            _SECONDS,
        )
        self._gap = PlainHistogram(
            "warmroute_inter_token_seconds",
            "Mean gap between the events of a streamed answer",
            _GAP_SECONDS,
        )
        self._e2e = PlainHistogram(
            "warmroute_request_seconds",
            "From a request's arrival to the last byte of its answer",
            _SECONDS,
        )
        registry.register(self)

    def faulty(self, status: int) -> None:
        """Count one by the status of its answer: 500 is the router's own, all else the client's."""
        if status == _OURS:
            self.internal_errors += 1
        else:
            self.client_errors[str(status)] += 1

    def prefilled(self, worker_id: int, outcome: Outcome, now_s: float) -> None:
        """The first leg of a request is over, and well; its client has seen nothing of it."""
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

    def ended(self, arrival: Arrival, worker_id: int, outcome: Outcome, now_s: float) -> None:
        """An attempt is over."""
        error, kind = outcome.error, ""
        if isinstance(error, WorkerError):
            if error.kind == "out_of_files":  # no worker heard of it: only its refusal counts
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
        if outcome.status is not None:  # else it has gone no way
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
        """All families, as of now."""
        yield counters(
            "warmroute_relayed_requests",
            "Workers' replies, by what carried them, and why where that was Python",
            "path why",
            {("python" if why else "native", why): count for why, count in self._relayed.items()},
        )
        yield counters(
            "warmroute_client_errors",
            "Requests refused as the client's fault, by status",
            "status",
            self.client_errors,
        )
        yield counter(
            "warmroute_internal_errors",
            "Requests that a defect of the router ended: its log says which",
            self.internal_errors,
        )
        yield counter(
            "warmroute_reported_hit_tokens",
            "Prompt tokens that workers reported as cached, of replies that report usage",
            self.reported_hit_tokens,
        )
        yield counter(
            "warmroute_reported_prompt_tokens",
            "Prompt tokens of replies that report cached tokens",
            self.reported_prompt_tokens,
        )
        for plain in (self.ttft, self._prefill, self._gap, self._e2e):
            yield from plain.collect()


def server_metrics(server: HttpServer) -> Iterator[Metric]:
    """The client port's own counts."""
    yield counters(
        "warmroute_server_refusals",
        "Requests and connections turned away before they were read, by reason",
        "reason",
        {reason: server.refusals[reason] for reason in (*REFUSALS, *GIVEN_UP)},
    )
    yield counter(
        "warmroute_server_deferred",
        "Connections of addresses whose requests keep being refused, read after others",
        server.deferred,
    )
    yield gauge("warmroute_server_connections", "Open connections of clients", server.connections)
    yield gauge(
        "warmroute_server_arriving_bytes",
        "Memory of requests that have not arrived in whole",
        server.held_bytes,
    )


_MIGRATION_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


_RESULTS = {(result, "early_close"): 0 for result in ("moved", "closed", "unfit", "refused")}


class MigrationMetrics:
    """Counts for `router.upstream.migration`. Lifetime: process."""

    def __init__(self) -> None:
        self.ended: Counted[tuple[str, str]] = Counted()  # (result, kind of failure)
        self.unfit: Counted[str] = Counted()  # by reason
        self.recomputed_tokens = 0
        self.kept_tokens: Callable[[], int] = int  # token ids of streams under way
        self.gap = PlainHistogram(
            "warmroute_migration_gap_seconds",
            "From the last byte of a lost worker to the first event of the next one",
            _MIGRATION_SECONDS,
        )

    def collect(self) -> Iterator[Metric]:
        """All families, as of now."""
        yield counters(
            "warmroute_migrations",
            "Streams whose worker failed after they had begun, by result and kind of failure",
            "result reason",
            _RESULTS | self.ended,  # shown from the beginning
        )
        yield counters(
            "warmroute_migration_unfit",
            "Streams that could not have gone on elsewhere, by reason, if any had to or not",
            "reason",
            {"moves": 0} | self.unfit,
        )
        yield counter(
            "warmroute_migration_recomputed_tokens",
            "Tokens of prompts and answers that were expected to be computed again to go on",
            self.recomputed_tokens,
        )
        name = "warmroute_migration_kept_tokens"
        yield gauge(
            name, "Token ids kept of streams under way, four bytes each", self.kept_tokens()
        )
        yield from self.gap.collect()


def token_metrics(check: TokenCheck, memo: MemoEncoder | None) -> Iterator[Metric]:
    """The check's own counts, with a series for each model that was checked, and the memo's."""
    exact = dict(check.exact())
    yield counters(
        "warmroute_tokenizer_mismatch",
        "Prompts and probes whose tokens differ from the worker's, by model",
        "model",
        {model: check.mismatches[model] for model in exact},
    )
    yield gauges(
        "warmroute_tokenizer_exact",
        "1 while prompts of a model are placed by their tokens, 0 while by text",
        "model",
        {model: 1 if trusted else 0 for model, trusted in exact.items()},
    )
    yield counters(
        "warmroute_tokenized_characters",
        "Characters of prompts that became ids, by encoding or from the memo",
        "result",
        {
            "encoded": 0 if memo is None else memo.encoded_chars,
            "reused": 0 if memo is None else memo.reused_chars,
        },
    )
    held = 0 if memo is None else memo.bytes
    yield gauge("warmroute_token_memo_bytes", "Memory of the memo", held)


def log_metrics(of: str, log: QueuedLog[Any] | None) -> Iterator[Metric]:
    """A log's lines; zero where there is none."""
    yield counters(
        f"warmroute_{of}_log_lines",
        f"Lines of the {of} log, written or lost for want of room",
        "result",
        _written(log, "written"),
    )


_PICKER_ENDS = ("placed", "refused", "unasked", "left", "watched", "broken")


def picker_metrics(counts: Mapping[str, int]) -> Iterator[Metric]:
    """What data planes asked the endpoint picker, and what became of it; zero where it is off."""
    text = "Requests that a data plane has asked about and not told the end of"
    yield gauge("warmroute_picker_streams", text, counts.get("open", 0))
    yield counters(
        "warmroute_picker_requests",
        "Requests that data planes asked about, by what became of them",
        "end",
        {end: counts.get(end, 0) for end in _PICKER_ENDS},
    )
    yield counters(
        "warmroute_picker_elsewhere",
        "Requests that a data plane sent elsewhere than told: to another worker, or to none",
        "to",
        {to: counts.get(to, 0) for to in ("moved", "stranger")},
    )


def tracing_metrics(exporter: QueuedLog[Any] | None) -> Iterator[Metric]:
    """The exporter's traces; zero where tracing is off."""
    yield counters(
        "warmroute_traces",
        "Sampled requests whose spans the collector took, or that were lost",
        "result",
        _written(exporter, "exported"),
    )


def _written(log: QueuedLog[Any] | None, name: str) -> dict[str, float]:
    return {name: 0, "lost": 0} if log is None else {name: log.written, "lost": log.lost}

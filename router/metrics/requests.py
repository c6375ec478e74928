"""Metrics of requests on their way: server, faults, relay, migration, tokens, logs, traces."""

from __future__ import annotations

from collections import Counter as relay_Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.wire.memo import MemoEncoder
from router.record.access_log import AccessLog
from router.request.prompts import TokenCheck
from router.server.responses import GIVEN_UP, REFUSALS
from router.server.server import Door
from router.tracing.export import Exporter
from router.upstream.reply import Outcome


class DoorCollector(Collector):
    """Reads the doors' own counts. Lifetime: process."""

    def __init__(self, doors: Mapping[str, Door]) -> None:
        self._doors = doors

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        refusals = CounterMetricFamily(
            "warmroute_server_refusals",
            "Requests and connections turned away before they were read, by port and reason",
            labels=["port", "reason"],
        )
        connections = GaugeMetricFamily(
            "warmroute_server_connections", "Open connections of clients", labels=["port"]
        )
        held = GaugeMetricFamily(
            "warmroute_server_arriving_bytes",
            "Memory of requests that have not arrived in whole",
            labels=["port"],
        )
        for port, door in self._doors.items():
            for reason in (*REFUSALS, *GIVEN_UP):
                refusals.add_metric([port, reason], door.refusals[reason])
            connections.add_metric([port], door.connections)
            held.add_metric([port], door.held_bytes)
        yield from (refusals, connections, held)


_OURS = 500


class FaultMetrics:
    """Lifetime: process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.clients = 0  # all of them, for who does not ask by status
        self.ours = 0
        self._clients = Counter(
            "warmroute_client_errors",
            "Requests refused as the client's fault, by status",
            ["status"],
            registry=registry,
        )
        self._ours = Counter(
            "warmroute_internal_errors",
            "Requests that a defect of the router ended: its log says which",
            registry=registry,
        )

    def faulty(self, status: int) -> None:
        """Count one by the status of its answer: 500 is the router's own, all else the client's."""
        if status == _OURS:
            self.ours += 1
            self._ours.inc()
        else:
            self.clients += 1
            self._clients.labels(str(status)).inc()


class RelayMetrics(Collector):
    """Lifetime: process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: relay_Counter[str] = relay_Counter({"": 0})  # by why; "": native
        registry.register(self)

    def outcome(self, outcome: Outcome) -> None:
        """A dispatch ended; one without a reply has gone no way."""
        if outcome.status is not None:
            self._counts[outcome.why_python] += 1

    def collect(self) -> list[Metric]:
        """The family, as of now."""
        family = CounterMetricFamily(
            "warmroute_relayed_requests",
            "Workers' replies, by what carried them, and why where that was Python",
            labels=["path", "why"],
        )
        for why, count in self._counts.items():
            family.add_metric(["python" if why else "native", why], count)
        return [family]


_GAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class MigrationMetrics:
    """Counts for `router.upstream.migration`. Lifetime: process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "warmroute_migrations",
            "Streams whose worker failed after they had begun, by result and kind of failure",
            ["result", "reason"],
            registry=registry,
        )
        for result in ("moved", "closed", "unfit", "refused"):  # shown from the beginning
            self._ended.labels(result, "early_close")
        self._stays = Counter(
            "warmroute_migration_unfit",
            "Streams that could not have gone on elsewhere, by reason, if any had to or not",
            ["reason"],
            registry=registry,
        )
        self._stays.labels("moves")
        self._recomputed = Counter(
            "warmroute_migration_recomputed_tokens",
            "Tokens of prompts and answers that were expected to be computed again to go on",
            registry=registry,
        )
        self._gap = Histogram(
            "warmroute_migration_gap_seconds",
            "From the last byte of a lost worker to the first event of the next one",
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self._kept = Gauge(
            "warmroute_migration_kept_tokens",
            "Token ids kept of streams under way, four bytes each",
            registry=registry,
        )

    def watch(self, kept_tokens: Callable[[], int]) -> None:
        """Show how many ids are kept."""
        self._kept.set_function(kept_tokens)

    def stays(self, reason: str) -> None:
        """See `router.upstream.migration.stream.Told`."""
        self._stays.labels(reason).inc()

    def moved(self, gap_s: float) -> None:
        """See `router.upstream.migration.stream.Told`."""
        self._gap.observe(max(gap_s, 0.0))

    def resent(self, tokens: int) -> None:
        """See `router.upstream.migration.stream.Told`."""
        self._recomputed.inc(tokens)

    def ended(self, result: str, reason: str) -> None:
        """See `router.upstream.migration.stream.Told`."""
        self._ended.labels(result, reason).inc()


class TokenCollector(Collector):
    """Reads the check's own counts, and the memo's. Lifetime: process."""

    def __init__(self, check: TokenCheck, encoder: MemoEncoder | None) -> None:
        self._check = check
        self._encoder = encoder

    def collect(self) -> Iterable[Metric]:
        """All families, as of now; those of models have a series for each that was checked."""
        yield from self._models()
        memo = self._encoder
        characters = CounterMetricFamily(
            "warmroute_tokenized_characters",
            "Characters of prompts that became ids, by encoding or from the memo",
            labels=["result"],
        )
        characters.add_metric(["encoded"], 0 if memo is None else memo.encoded_chars)
        characters.add_metric(["reused"], 0 if memo is None else memo.reused_chars)
        yield characters
        held = 0 if memo is None else memo.bytes
        yield GaugeMetricFamily("warmroute_token_memo_bytes", "Memory of the memo", value=held)

    def _models(self) -> Iterator[Metric]:
        mismatches = CounterMetricFamily(
            "warmroute_tokenizer_mismatch",
            "Prompts and probes whose tokens differ from the worker's, by model",
            labels=["model"],
        )
        exact = GaugeMetricFamily(
            "warmroute_tokenizer_exact",
            "1 while prompts of a model are placed by their tokens, 0 while by text",
            labels=["model"],
        )
        for model, trusted in self._check.exact():
            mismatches.add_metric([model], self._check.mismatches[model])
            exact.add_metric([model], 1 if trusted else 0)
        yield mismatches
        yield exact


class AccessCollector(Collector):
    """Zero where there is no log. Lifetime: process."""

    def __init__(self, log: AccessLog | None) -> None:
        self._log = log

    def collect(self) -> Iterable[Metric]:
        """The one family."""
        lines = CounterMetricFamily(
            "warmroute_access_log_lines",
            "Lines of the access log, written or lost for want of room",
            labels=["result"],
        )
        written = 0 if self._log is None else self._log.written
        lines.add_metric(["written"], written)
        lines.add_metric(["lost"], 0 if self._log is None else self._log.lost)
        yield lines


class TracingCollector(Collector):
    """Zero where tracing is off. Lifetime: process."""

    def __init__(self, exporter: Exporter | None) -> None:
        self._exporter = exporter

    def collect(self) -> Iterable[Metric]:
        """The one family."""
        traces = CounterMetricFamily(
            "warmroute_traces",
            "Sampled requests whose spans the collector took, or that were lost",
            labels=["result"],
        )
        exporter = self._exporter
        traces.add_metric(["exported"], 0 if exporter is None else exporter.exported)
        traces.add_metric(["lost"], 0 if exporter is None else exporter.lost)
        yield traces

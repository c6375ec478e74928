"""The worker's measurements: counters by vLLM's names, the latest steps, and a log of steps as CSV.

Counters are plain numbers and histograms plain lists, because a token passes here every few
microseconds; prometheus-client makes text of them at a scrape.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import Step, StepSplit
from engine.server.settings import Backends, Runner, no_backends
from engine.step_time import StepLoad
from engine.transfer import Exporter, Importer
from engine.wire import metrics as names

HEADER = "prefill_tokens,prefill_seqs,decode_seqs,decode_ctx_tokens,attention_pairs,seconds\n"
BUFFER_BYTES = 1 << 16
MAX_BYTES = 1 << 30  # then the log stops, so that a forgotten log does not fill the disk

log = logging.getLogger(__name__)


class StepLogError(Exception):
    """Raised if the file cannot be created; the message says which, and why."""


class StepLog:
    """A log of steps as CSV; each process begins a new file. Lifetime: process. Raises
    `StepLogError` if the file cannot be created.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._remaining_bytes = max_bytes - len(HEADER)
        try:
            self._file = path.open("w", encoding="ascii", buffering=BUFFER_BYTES)
        except OSError as error:
            raise StepLogError(f"step log {path}: {error.strerror or error}") from error
        self._file.write(HEADER)

    def note(self, load: StepLoad, seconds: float) -> None:
        """Write one step to the log. If the disk or the log is full, the log ends and the worker
        continues.
        """
        if self._file.closed:
            return
        line = (
            f"{load.prefill_tokens},{load.prefill_seqs},{load.decode_seqs},"
            f"{load.decode_ctx_tokens},{load.attention_pairs:.1f},{seconds:.9f}\n"
        )
        self._remaining_bytes -= len(line)
        if self._remaining_bytes < 0:
            log.warning("step log %s is full: no further steps are written", self._path)
            self.close()
            return
        try:
            self._file.write(line)
        except OSError as error:
            log.warning("step log %s: %s: no further steps are written", self._path, error)
            self.close()

    def close(self) -> None:
        """Write buffered lines and close the file. It may be called again."""
        try:
            self._file.close()
        except OSError as error:  # the last lines did not fit the disk
            log.warning("step log %s: %s: it may lack its last lines", self._path, error)


KEPT_STEPS = 1000


class StepRecord(msgspec.Struct, frozen=True):
    """One step in the form of `/debug/steps`."""

    number: int
    ended_at_s: float  # seconds since the epoch
    batch_size: int  # requests that it computed something for
    decode_tokens: int
    prefill_tokens: int
    prefill_requests: int
    budget_tokens: int  # the tokens that it could have computed
    budget_used: float  # share of them, 0..1
    schedule_ms: float
    compute_ms: float
    complete_ms: float
    answer_ms: float  # events and bytes to clients
    modelled_ms: float | None
    graph: str | None  # hit, or why the step was none of a graph: chunks, graph_limit, fallback
    padded_rows: int
    int8: str | None  # the backend of the layers' INT8 weights: torch, kvkernels
    shared_prefix_groups: int  # runs of tokens whose KV several decodes read once
    kv_bytes_saved: int  # by that, in all layers
    preemptions: int
    recomputed_tokens: int
    running: int  # when it had ended
    waiting: int
    kv_used_blocks: int
    kv_blocks: int
    waiting_by_reason: dict[str, int]  # during this step; reasons without requests are left out


class Total:
    """A number of executions and the sum of their nanoseconds, as in Triton's statistics. Lifetime:
    worker.
    """

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, seconds: float) -> None:
        """Count one execution of `seconds`."""
        self.count += 1
        self.ns += max(0, round(seconds * 1e9))

    def shown(self) -> dict[str, int]:
        """Return the total as JSON data."""
        return {"count": self.count, "ns": self.ns}


class BatchTotals:
    """The number of steps of one batch size, and their time before, in and after the model."""

    __slots__ = ("compute_infer", "compute_input", "compute_output")

    def __init__(self) -> None:
        self.compute_input = Total()
        self.compute_infer = Total()
        self.compute_output = Total()


class StepRecords:
    """A ring buffer of the latest steps. Lifetime: worker."""

    def __init__(self, scheduler: Scheduler, kept: int = KEPT_STEPS) -> None:
        self._scheduler = scheduler
        self._ring: deque[StepRecord] = deque(maxlen=kept)
        self._reasons = dict(scheduler.not_scheduled_total)
        self._recomputed_tokens = scheduler.recomputed_tokens_total
        # Of all steps since the start.
        self.phase_s = {"schedule": 0.0, "compute": 0.0, "complete": 0.0, "answer": 0.0}
        self.tokens = {"prefill": 0, "decode": 0}
        self.batches: dict[int, BatchTotals] = {}  # by size, which `max_batch_size` bounds

    @property
    def requests(self) -> dict[str, int]:
        """Return the numbers of requests in the engine, in the last step, and at most in the
        engine: the kinds of `nv_trt_llm_request_metrics` of Triton's TensorRT-LLM backend.
        """
        scheduler = self._scheduler
        return {
            "active": scheduler.running + scheduler.waiting,
            "scheduled": self._ring[-1].batch_size if self._ring and scheduler.running else 0,
            "max": scheduler.settings.max_batch_size,
        }

    def note(self, step: Step, split: StepSplit, answer_s: float, at_s: float) -> None:
        """Record a step that has just ended. Call this for each step; otherwise its counts go to
        the next one.
        """
        scheduler = self._scheduler
        totals = scheduler.not_scheduled_total
        reasons = {
            reason.value: count - self._reasons.get(reason, 0)
            for reason, count in totals.items()
            if count != self._reasons.get(reason, 0)
        }
        self._reasons = dict(totals)
        recomputed_tokens = scheduler.recomputed_tokens_total - self._recomputed_tokens
        self._recomputed_tokens = scheduler.recomputed_tokens_total
        self.phase_s["schedule"] += split.schedule_s
        self.phase_s["compute"] += split.compute_s
        self.phase_s["complete"] += split.complete_s
        self.phase_s["answer"] += answer_s
        self.tokens["prefill"] += step.prefill_tokens
        self.tokens["decode"] += step.decode_seqs
        budget_tokens = scheduler.settings.max_num_tokens
        modelled_s = split.modelled_s
        size = step.decode_seqs + step.prefill_seqs
        batch = self.batches.setdefault(size, BatchTotals())
        batch.compute_input.add(split.schedule_s)
        batch.compute_infer.add(split.compute_s)
        batch.compute_output.add(split.complete_s + answer_s)
        self._ring.append(
            StepRecord(
                number=step.number,
                ended_at_s=at_s,
                batch_size=size,
                decode_tokens=step.decode_seqs,
                prefill_tokens=step.prefill_tokens,
                prefill_requests=step.prefill_seqs,
                budget_tokens=budget_tokens,
                budget_used=(step.decode_seqs + step.prefill_tokens) / budget_tokens,
                schedule_ms=split.schedule_s * 1e3,
                compute_ms=split.compute_s * 1e3,
                complete_ms=split.complete_s * 1e3,
                answer_ms=answer_s * 1e3,
                modelled_ms=None if modelled_s is None else modelled_s * 1e3,
                graph=split.graph,
                padded_rows=split.padded_rows,
                int8=split.int8,
                shared_prefix_groups=split.shared_prefix_groups,
                kv_bytes_saved=split.kv_bytes_saved,
                preemptions=len(step.preempted),
                recomputed_tokens=recomputed_tokens,
                running=scheduler.running,
                waiting=scheduler.waiting,
                kv_used_blocks=scheduler.kv_used_blocks,
                kv_blocks=scheduler.pool.blocks,
                waiting_by_reason=reasons,
            )
        )

    def last(self, count: int) -> list[StepRecord]:
        """Return the latest `count` records, oldest first."""
        start = max(0, len(self._ring) - count)
        return [self._ring[index] for index in range(start, len(self._ring))]


# Bucket bounds in seconds: vLLM's, up to a few minutes.
_UPPER_S = (0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, *_UPPER_S, 160.0, 640.0)
_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, *_UPPER_S)
_E2E_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)


class Histogram:
    """A histogram: how many values are at most each bound. Lifetime: process."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative counts by upper bound, and the sum, as Prometheus expects them."""
        running = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows, self._sum


Value = float | Mapping[str, float]


class Counters:
    """The counts that the server makes itself. Lifetime: worker."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter(length=0, stop=0, abort=0)
        self.refused: Counter[str] = Counter()
        self.slow_clients = 0
        self.graph_steps: Counter[str] = Counter()  # by use, where there are graphs
        self.padded_rows = 0
        self.int8_steps: Counter[str] = Counter()  # by backend, where weights are INT8
        self.shared_prefix_groups = 0
        self.kv_bytes_saved = 0
        self.unread_requests = 0
        self.ttft_s = Histogram(_TTFT_S)
        self.gap_s = Histogram(_GAP_S)
        self.e2e_s = Histogram(_E2E_S)
        # Of whole requests, as Triton counts them: from their arrival to their end; of those that
        # ended well also to their first step, and from there.
        self.success, self.fail, self.queue, self.infer = Total(), Total(), Total(), Total()
        self.last_inference_s = 0.0  # unix time; 0: none yet

    def ended(self, request: Request, now_s: float, unix_s: float) -> None:
        """Count a request that was answered completely."""
        started_s = now_s if request.started_s is None else request.started_s
        self.success.add(now_s - request.arrival_s)
        self.queue.add(started_s - request.arrival_s)
        self.infer.add(now_s - started_s)
        self.last_inference_s = unix_s


class WorkerCollector(Collector):
    """Collects the metrics of the worker's parts at each scrape. Lifetime: worker."""

    def __init__(
        self,
        counters: Counters,
        runner: Runner,
        steps: StepRecords,
        model_name: str,
        backends: Backends = no_backends,
        transfers: tuple[Exporter, Importer] | None = None,
    ) -> None:
        self._transfers = transfers
        self._counters = counters
        self._runner = runner
        self._steps = steps
        self._backends = backends
        self._labels = {"model_name": model_name, "engine": "0"}
        self._started_s = time.time()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """Return Prometheus text, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families: first those with vLLM's names, then those with the engine's
        own names.
        """
        # An idle engine makes no steps that end pins and leases.
        scheduler, now_s = self._runner.scheduler, self._runner.clock.now_s()
        scheduler.pins.advance(now_s)
        scheduler.exports.advance(now_s)
        yield from self._vllm()
        for part, (backend, why) in self._backends().items():
            name = f"warmroute_engine_{part}_backend"
            text = f"The backend that computes {part}, and the reason for this backend."
            yield self._info(name, text, {"backend": backend, "because_of": why})
        yield from self._own()
        yield from self._of_cache()
        if self._transfers is not None:
            exporter, importer = self._transfers
            yield from self._of_exports(exporter)
            yield from self._of_imports(importer)
            moved = {"sent": exporter.sent_bytes_total, "received": importer.received_bytes_total}
            name = "warmroute_engine_kv_bytes"
            yield self._counter(name, "KV that was moved between workers.", moved, "direction")

    def _vllm(self) -> Iterator[Metric]:
        """Yield the metrics that vLLM has, under its names."""
        text = "Start time of the process since unix epoch in seconds."
        yield GaugeMetricFamily(names.PROCESS_START, text, value=self._started_s)
        scheduler, counters = self._runner.scheduler, self._counters
        pool, gauge, counter = scheduler.pool, self._gauge, self._counter
        yield gauge(names.RUNNING, "Requests in the batch.", scheduler.running)
        yield gauge(names.WAITING, "Requests not admitted yet.", scheduler.waiting)
        usage = scheduler.kv_used_blocks / pool.blocks
        yield gauge(names.KV_USAGE, "Share of KV blocks held by requests, 0..1.", usage)
        queries, hits = scheduler.prefix_query_tokens_total, scheduler.prefix_hit_tokens_total
        yield counter(names.PREFIX_QUERIES, "Prompt tokens looked up in the prefix cache.", queries)
        yield counter(names.PREFIX_HITS, "Prompt tokens found in the prefix cache.", hits)
        if pool.host.blocks:
            text = "Prompt tokens looked up in host memory."
            yield counter(names.EXTERNAL_QUERIES, text, queries - hits)
            text = "Prompt tokens loaded from host memory."
            yield counter(names.EXTERNAL_HITS, text, scheduler.host_hit_tokens_total)
        text = "Prompt tokens of answered requests."
        yield counter(names.PROMPT_TOKENS, text, counters.prompt_tokens)
        yield counter(names.GENERATION_TOKENS, "Generated tokens.", counters.generation_tokens)
        yield counter(names.PREEMPTIONS, "Preemptions.", scheduler.preemptions_total)
        text = "Finished requests."
        yield counter(names.REQUEST_SUCCESS, text, counters.finished, "finished_reason")
        yield self._histogram(names.TTFT, "Time to the first token.", counters.ttft_s)
        yield self._histogram(names.INTER_TOKEN, "Time between tokens.", counters.gap_s)
        yield self._histogram(names.E2E, "Time to the last token.", counters.e2e_s)
        cache = {"block_size": str(pool.block_size), "num_gpu_blocks": str(pool.blocks)}
        name = names.CACHE_CONFIG.removesuffix("_info")
        cache["enable_prefix_caching"] = "True"
        yield self._info(name, "Settings of the KV cache.", cache)

    def _own(self) -> Iterator[Metric]:
        runner, counters, own = self._runner, self._counters, "warmroute_engine_"
        scheduler, gauge, counter = runner.scheduler, self._gauge, self._counter
        yield counter(own + "steps", "Steps scheduled.", scheduler.steps_total)
        text = "Steps that ended later than modelled: this machine is too busy for the speed."
        yield counter(own + "overrun_steps", text, runner.overrun_steps_total)
        yield counter(own + "busy_seconds", "Seconds that steps took.", runner.busy_s_total)
        text = "Seconds of each phase of the steps. Phases may overlap."
        yield counter(own + "step_phase_seconds", text, self._steps.phase_s, "phase")
        yield counter(own + "step_tokens", "Tokens computed.", self._steps.tokens, "of")
        budget = scheduler.settings.max_num_tokens
        yield gauge(own + "step_budget_tokens", "Tokens that a step may compute.", budget)
        text = "Requests: active, scheduled in the last step, and the limit."
        yield gauge(own + "requests", text, self._steps.requests, "kind")
        reasons = {key.value: count for key, count in scheduler.not_scheduled_total.items()}
        text = "Waiting requests, counted at each step."
        yield counter(own + "not_scheduled", text, reasons, "reason")
        yield counter(own + "refused", "Requests refused.", counters.refused, "reason")
        text = "Streams that ended because the client did not read."
        yield counter(own + "slow_clients", text, counters.slow_clients)
        text = "Steps that ran as a CUDA graph, or the reason why they did not."
        yield counter(own + "graph_steps", text, counters.graph_steps, "use")
        text = "Padding rows that CUDA graphs computed."
        yield counter(own + "graph_padded_rows", text, counters.padded_rows)
        if "int8" in self._backends():
            text = "Steps by the backend that multiplied the INT8 weights."
            yield counter(own + "int8_steps", text, counters.int8_steps, "backend")
        text = "Requests that were not valid HTTP."
        yield counter(own + "unread_requests", text, counters.unread_requests)

    def _of_cache(self) -> Iterator[Metric]:
        scheduler, counters, own = self._runner.scheduler, self._counters, "warmroute_engine_"
        text = "Shared prefixes whose KV a step read once for several decodes."
        yield self._counter(own + "shared_prefix_groups", text, counters.shared_prefix_groups)
        text = "Bytes of KV reads that shared prefixes saved."
        yield self._counter(own + "kv_bytes_saved", text, counters.kv_bytes_saved)
        pool, pins = scheduler.pool, scheduler.pins
        yield self._gauge(own + "cached_blocks", "Blocks in the prefix cache.", pool.cached_blocks)
        text = "Blocks kept in host memory."
        yield self._gauge(own + "host_blocks", text, len(pool.host))
        yield self._gauge(own + "pinned_blocks", "Blocks that are pinned.", pins.held_blocks)
        yield self._counter(own + "evicted_blocks", "Blocks evicted.", pool.evicted_total)

    def _of_exports(self, exporter: Exporter) -> Iterator[Metric]:
        own = "warmroute_engine_kv_"
        exports = self._runner.scheduler.exports
        text = "Prompts whose KV is held for other workers."
        yield self._gauge(own + "exports", text, len(exports))
        text = "Blocks that are held for other workers."
        yield self._gauge(own + "exported_blocks", text, exports.held_blocks)
        ends = {"read": exporter.sent_total, "late": exporter.late_total}
        ends |= {"expired": exports.expired_total, "too_many": exports.refused_total}
        text = "Prompts that were held for other workers, by how the hold ended."
        yield self._counter(own + "exports_ended", text, ends, "end")
        text = "Readers of KV that were refused."
        yield self._counter(own + "readers_refused", text, exporter.refused, "reason")
        text = "Prompts whose KV was freed before another worker read it."
        yield self._counter(names.NIXL_EXPIRED, text, exports.expired_total)

    def _of_imports(self, importer: Importer) -> Iterator[Metric]:
        own = "warmroute_engine_kv_"
        text = "Requests that wait for KV from other workers."
        yield self._gauge(own + "imports", text, importer.active)
        come = {"received": importer.received_total, **importer.failed}
        text = "Reads of a prompt's KV from other workers, by outcome."
        yield self._counter(own + "reads", text, come, "outcome")
        text = "Seconds from reserving blocks until their KV has arrived."
        yield self._counter(own + "read_seconds", text, importer.wait_s_total)
        text = "Reads of other workers' KV that failed."
        yield self._counter(names.NIXL_FAILED, text, importer.failed.total())

    def _gauge(self, name: str, text: str, value: Value, label: str | None = None) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=self._names(label)), value)

    def _counter(self, name: str, text: str, value: Value, label: str | None = None) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=self._names(label)), value)

    def _names(self, label: str | None) -> list[str]:
        return [*self._labels, *([label] if label else [])]

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, value: Value) -> Metric:
        """Return `family` with one value, or with one for each value of its last label."""
        given = list(self._labels.values())
        if isinstance(value, Mapping):
            for key, one in value.items():
                family.add_metric([*given, key], one)
        else:
            family.add_metric(given, value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        buckets, total = histogram.buckets()
        family.add_metric(list(self._labels.values()), buckets, total)
        return family

    def _info(self, name: str, text: str, values: dict[str, str]) -> Metric:
        family = InfoMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), values)
        return family

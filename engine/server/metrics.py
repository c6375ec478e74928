"""What the worker counts, in vLLM's names where vLLM has one.

Counters are plain numbers and histograms plain lists, since a token passes here every few
microseconds; prometheus-client turns them into text when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.scheduler import Scheduler
from engine.server.runners import NO_BACKENDS, Backends, Runner
from engine.server.step_records import StepRecords
from engine.wire import metrics as names

# Bucket bounds in seconds: vLLM's, up to a few minutes.
_UPPER_S = (0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, *_UPPER_S, 160.0, 640.0)
_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, *_UPPER_S)
_E2E_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)


class Histogram:
    """Counts of values up to each bound. Lifetime: process."""

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
        """Cumulated counts by upper bound, and the sum, as Prometheus wants them."""
        running = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows, self._sum


class Tallies:
    """What the server counts itself. Lifetime: worker."""

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


class WorkerCollector(Collector):
    """Reads the worker's parts when it is scraped. Lifetime: worker."""

    def __init__(
        self,
        tallies: Tallies,
        runner: Runner,
        steps: StepRecords,
        model_name: str,
        backends: Backends = NO_BACKENDS,
    ) -> None:
        self._tallies = tallies
        self._runner = runner
        self._steps = steps
        self._backends = backends
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """All families, the engine's own names last."""
        scheduler, tallies = self._runner.scheduler, self._tallies
        pool = scheduler.pool
        yield self._gauge(names.RUNNING, "Requests in the batch.", scheduler.running)
        yield self._gauge(names.WAITING, "Requests not admitted yet.", scheduler.waiting)
        usage = scheduler.kv_used_blocks / pool.blocks
        yield self._gauge(names.KV_USAGE, "Share of KV blocks held by requests, 0..1.", usage)
        yield self._counter(
            names.PREFIX_QUERIES,
            "Prompt tokens looked up in the prefix cache.",
            scheduler.prefix_query_tokens_total,
        )
        yield self._counter(
            names.PREFIX_HITS,
            "Prompt tokens found in the prefix cache.",
            scheduler.prefix_hit_tokens_total,
        )
        yield self._counter(
            names.PROMPT_TOKENS, "Prompt tokens of answered requests.", tallies.prompt_tokens
        )
        yield self._counter(names.GENERATION_TOKENS, "Tokens given.", tallies.generation_tokens)
        yield self._counter(names.PREEMPTIONS, "Preemptions.", scheduler.preemptions_total)
        yield self._by(
            names.REQUEST_SUCCESS, "Finished requests.", "finished_reason", tallies.finished
        )
        yield self._histogram(names.TTFT, "Time to the first token.", tallies.ttft_s)
        yield self._histogram(names.INTER_TOKEN, "Time between tokens.", tallies.gap_s)
        yield self._histogram(names.E2E, "Time to the last token.", tallies.e2e_s)
        yield self._cache_config(pool.block_size, pool.blocks)
        for part, chosen in self._backends.items():
            yield self._backend(part, *chosen)
        yield from self._own(scheduler)

    def _own(self, scheduler: Scheduler) -> Iterator[Metric]:
        runner, tallies, own = self._runner, self._tallies, "warmroute_engine_"
        yield self._counter(own + "steps", "Steps scheduled.", scheduler.steps_total)
        yield self._counter(
            own + "overrun_steps",
            "Steps that ended later than modelled: this machine is too busy for the speed.",
            runner.overrun_steps_total,
        )
        yield self._counter(own + "busy_seconds", "Seconds of steps.", runner.busy_s_total)
        text = "Seconds of steps' parts; with overlap more than passed."
        yield self._by(own + "step_phase_seconds", text, "phase", self._steps.phase_s)
        yield self._by(own + "step_tokens", "Tokens computed.", "of", self._steps.tokens)
        budget = scheduler.settings.max_num_tokens
        yield self._gauge(own + "step_budget_tokens", "Tokens that a step may compute.", budget)
        yield self._requests(scheduler)
        reasons = {key.value: count for key, count in scheduler.not_scheduled_total.items()}
        yield self._by(own + "not_scheduled", "Request-steps spent waiting.", "reason", reasons)
        yield self._by(own + "refused", "Requests refused.", "reason", tallies.refused)
        yield self._counter(own + "slow_clients", "Streams cut as unread.", tallies.slow_clients)
        yield self._by(
            own + "graph_steps", "Steps of a CUDA graph, or why not.", "use", tallies.graph_steps
        )
        yield self._counter(
            own + "graph_padded_rows", "Rows of graphs computed for nobody.", tallies.padded_rows
        )
        if "int8" in self._backends:
            text = "Steps by what multiplied the layers' INT8 weights."
            yield self._by(own + "int8_steps", text, "backend", tallies.int8_steps)
        unread = tallies.unread_requests
        yield self._counter(own + "unread_requests", "Requests that were no HTTP.", unread)
        shared, saved = tallies.shared_prefix_groups, tallies.kv_bytes_saved
        text = "Runs of tokens in a step whose KV several decodes read once."
        yield self._counter(own + "shared_prefix_groups", text, shared)
        yield self._counter(own + "kv_bytes_saved", "KV that was not read for that.", saved)
        yield self._gauge(
            own + "cached_blocks", "Blocks in the prefix cache.", scheduler.pool.cached_blocks
        )
        scheduler.pins.advance(runner.clock.now_s())  # an idle engine makes no steps that end them
        pinned_blocks = scheduler.pins.held_blocks
        yield self._gauge(own + "pinned_blocks", "Blocks that pins keep.", pinned_blocks)
        yield self._counter(own + "evicted_blocks", "Blocks evicted.", scheduler.pool.evicted_total)

    def _requests(self, scheduler: Scheduler) -> Metric:
        """Requests in the engine, those of the last step, and how many a step may have.

        The kinds are those of `nv_trt_llm_request_metrics` of Triton's TensorRT-LLM backend.
        """
        last = self._steps.last(1)
        values = {
            "active": scheduler.running + scheduler.waiting,
            "scheduled": last[0].batch_size if last and scheduler.running else 0,
            "max": scheduler.settings.max_batch_size,
        }
        name, text = (
            "warmroute_engine_requests",
            "Requests in the engine, in the last step, at most.",
        )
        family = GaugeMetricFamily(name, text, labels=[*self._labels, "kind"])
        for kind, value in values.items():
            family.add_metric([*self._labels.values(), kind], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        buckets, total = histogram.buckets()
        family.add_metric(list(self._labels.values()), buckets, total)
        return family

    def _backend(self, part: str, backend: str, why: str) -> Metric:
        name, text = f"warmroute_engine_{part}_backend", f"What computes {part}, and why."
        family = InfoMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), {"backend": backend, "because_of": why})
        return family

    def _cache_config(self, block_size: int, blocks: int) -> Metric:
        family = InfoMetricFamily(
            names.CACHE_CONFIG.removesuffix("_info"), "KV cache.", labels=list(self._labels)
        )
        config = {
            "block_size": str(block_size),
            "num_gpu_blocks": str(blocks),
            "enable_prefix_caching": "True",
        }
        family.add_metric(list(self._labels.values()), config)
        return family


class Exposition:
    """The text of /metrics. Lifetime: worker."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)

    def text(self) -> bytes:
        """Prometheus text, version 0.0.4."""
        return generate_latest(self._registry)

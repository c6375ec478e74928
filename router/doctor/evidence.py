"""Computes evidence from several readings of a server: differences of counters, and means of
gauges. The functions are pure. Counters that fell (because the model was reloaded) are ignored.
Gauges are ignored while the engine makes no steps, which an unchanged iteration counter shows.
Times are in seconds and sizes in tokens; NaN means unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.wire import metrics as names
from router.doctor.readings import (
    BLOCKS,
    DEVICE_TOTAL,
    DEVICE_USED,
    ENGINE_REQUESTS,
    FAILURES,
    GENERAL,
    IN_FLIGHT,
    INPUT_TOKENS,
    NOT_SCHEDULED,
    OUTPUT_TOKENS,
    PENDING,
    REQUESTS,
    SGLANG,
    STATIC,
    STEP_BUDGET,
    STEP_TOKENS,
    STEPS,
    Count,
    ExaminedServer,
    Gauges,
    Reading,
    Stats,
    TritonModelConfig,
    Watched,
)

_NS = 1e9
_OFTEN, _OFTEN_SHARE = 20, 0.1  # as many executions, or such a share of all, tell a size's time
NO_CONFIG = TritonModelConfig()  # the configuration of an engine that reports none


@dataclass(frozen=True, slots=True)
class SizeTime:
    """The number of executions of one batch size, and their mean time."""

    batch: int
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelEvidence:
    """The evidence about one model of a Triton server during the watch."""

    config: TritonModelConfig
    seconds: float  # that were watched
    requests: int = 0  # that succeeded
    rows: int = 0  # inferences: a request may have several
    executions: int = 0
    queue_s: float = 0.0  # mean wait of a request that was executed
    queue_sum_s: float = 0.0
    latency_s: float = 0.0  # mean of such a request, within the server
    latency_sum_s: float = 0.0
    sizes: tuple[SizeTime, ...] = ()
    rejected: int = 0  # that waited too long
    failed: int = 0
    cache_hits: int = 0
    pending: float = math.nan  # mean
    steps_of: tuple[str, ...] = ()  # ensembles that it is a step of
    restarted: bool = False

    @property
    def rate(self) -> float:
        """The number of requests that the model gets per second."""
        return self.requests / self.seconds

    @property
    def executed(self) -> int:
        """The number of requests that the response cache did not answer."""
        return self.requests - self.cache_hits

    @property
    def executed_rate(self) -> float:
        """The number of requests per second that the response cache did not answer."""
        return self.executed / self.seconds

    @property
    def mean_batch(self) -> float:
        """The mean number of inferences in an execution; NaN if there were no executions."""
        return self.rows / self.executions if self.executions else math.nan

    @property
    def waiting(self) -> float:
        """The mean number of requests in the queue, by Little's law or by the gauge, whichever is
        greater.
        """
        counted = self.queue_sum_s / self.seconds
        return counted if math.isnan(self.pending) else max(counted, self.pending)

    @property
    def in_flight(self) -> float:
        """The mean number of requests in the server (Little's law)."""
        return self.latency_sum_s / self.seconds

    @property
    def busy(self) -> float:
        """The mean number of executions that run at the same time."""
        return math.fsum(one.count * one.seconds for one in self.sizes) / self.seconds

    @property
    def utilisation(self) -> float:
        """The share of time in which the instances are busy, 0..1."""
        return self.busy / self.config.instances

    @property
    def service_s(self) -> float:
        """The mean time of an execution in seconds; NaN if there were no executions."""
        count = sum(one.count for one in self.sizes)
        total = math.fsum(one.count * one.seconds for one in self.sizes)
        return total / count if count else math.nan

    @property
    def singles(self) -> float:
        """The share of executions whose batch has only one inference, 0..1."""
        count = sum(one.count for one in self.sizes)
        return sum(one.count for one in self.sizes if one.batch <= 1) / count if count else 0.0

    @property
    def growth(self) -> float:
        """The growth of an execution's time with the batch size: 1 means linear growth, and near 0
        means no growth. The value is NaN if larger batches occurred too seldom. If requests are
        seldom joined, they are joined mostly while the machine is stalled, and their batches take
        longer for that reason alone.
        """
        enough = min(_OFTEN, _OFTEN_SHARE * sum(one.count for one in self.sizes))
        larger = [one for one in self.sizes[1:] if one.count >= enough]
        if not larger:
            return math.nan
        least, most = self.sizes[0], larger[-1]
        if not (least.seconds and least.batch):
            return math.nan
        return (most.seconds / least.seconds - 1) / (most.batch / least.batch - 1)

    @property
    def batches(self) -> bool:
        """True if Triton's dynamic batcher may join requests of this model into batches."""
        return self.config.dynamic_batching is not None and self.config.max_batch_size > 1


@dataclass(frozen=True, slots=True)
class EngineEvidence:
    """The evidence about one LLM engine with its own scheduler. The figures are means over the
    samples of the watch in which the engine made steps.
    """

    model: str
    active: float
    scheduled: float
    waiting: float
    most: float = math.nan  # requests in a batch at most
    active_range: tuple[float, float] = (math.nan, math.nan)
    scheduled_range: tuple[float, float] = (math.nan, math.nan)
    context: float = math.nan  # requests in prefill
    generation: float = math.nan
    context_tokens: float = math.nan  # of prefill in an iteration
    paused: float = math.nan
    preemptions: float = 0.0
    kv_tokens: float = math.nan  # that the cache holds
    kv_share: float = math.nan  # 0..1 in use
    reused: float = math.nan  # blocks or tokens found in the cache, more than before
    queried: float = math.nan  # prompt tokens looked up
    input_tokens: float = math.nan  # mean of a request
    output_tokens: float = math.nan
    step_tokens: float = math.nan  # most of a step
    static: bool = False
    reasons: Mapping[str, float] = field(default_factory=dict)  # request-steps not scheduled
    config: TritonModelConfig = NO_CONFIG
    moving: bool = True

    @property
    def main_reason(self) -> str | None:
        """The reason for which most requests waited; None if the engine reports no reasons."""
        if not any(self.reasons.values()):
            return None
        return max(self.reasons, key=lambda reason: self.reasons[reason])


@dataclass(frozen=True, slots=True)
class ServerEvidence:
    """The evidence about one server during the watch."""

    server: ExaminedServer
    seconds: float
    models: Mapping[str, ModelEvidence] = field(default_factory=dict)
    engines: tuple[EngineEvidence, ...] = ()
    device_share: float = math.nan  # of the fullest device's memory, in use

    @property
    def loaded(self) -> bool:
        """True if the server had any request or active engine during the watch."""
        busy = any(m.requests or m.failed or m.pending > 0 for m in self.models.values())
        return busy or any(engine.moving and engine.active > 0 for engine in self.engines)

    @property
    def main(self) -> ModelEvidence | None:
        """The model that clients call: the one with the most requests that is no step of an
        ensemble; None if there is none.
        """
        whole = [m for m in self.models.values() if m.requests and not m.steps_of]
        return max(whole, key=lambda m: m.requests, default=None)


@dataclass(frozen=True, slots=True)
class RouterEvidence:
    """The counts of the warmroute router during the watch."""

    connections: float  # of clients, mean
    in_flight: float  # requests of clients, mean
    most_in_flight: float
    by_url: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # requests, each look
    refused: Mapping[str, float] = field(default_factory=dict)  # 503 by worker's URL
    hit_share: float = math.nan  # of prompt tokens, found at the workers


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """Facts that servers cannot report, so that the operator gives them; None or empty if a fact is
    not given.
    """

    texts: Mapping[str, int] = field(default_factory=dict)  # errors, by cause's key
    router: RouterEvidence | None = None
    concurrency: int | None = None
    connections: int | None = None
    input_tokens: float | None = None
    max_tokens: float | None = None
    max_num_tokens: float | None = None
    shapes: int | None = None  # distinct ones among requests
    input_sets: int | None = None
    latencies: Mapping[int, float] = field(default_factory=dict)  # by concurrency of the probe


@dataclass(frozen=True, slots=True)
class Evidence:
    """All the evidence from which the doctor judges."""

    servers: tuple[ServerEvidence, ...]
    facts: ClientFacts = ClientFacts()

    @property
    def loaded(self) -> bool:
        """True if at least one server had load during the watch."""
        return any(server.loaded for server in self.servers)


def evidence_of(watched: Watched) -> ServerEvidence:
    """Return the evidence in a server's readings."""
    first, last = watched.readings[0], watched.readings[-1]
    seconds = max(last.at_s - first.at_s, 1e-6)
    server = watched.server
    models = {
        name: _model(config, watched, seconds)
        for name, config in server.configs.items()
        if server.kind == "triton"
    }
    if server.kind == "triton":
        engines = tuple(
            _backend(model, watched) for model in last.gauges.models(REQUESTS) + _static(last)
        )
    elif server.kind == "sglang":
        engines = (_sglang(watched),)
    else:
        engines = (_vllm(watched),)
    used = last.gauges.split(DEVICE_USED, "gpu_uuid")
    total = last.gauges.split(DEVICE_TOTAL, "gpu_uuid")
    shares = [used[gpu] / total[gpu] for gpu in used if total.get(gpu)]
    return ServerEvidence(server, seconds, models, engines, max(shares, default=math.nan))


def _model(config: TritonModelConfig, watched: Watched, seconds: float) -> ModelEvidence:
    readings, name = watched.readings, config.name
    steps_of = tuple(c.name for c in watched.server.configs.values() if name in c.steps)
    old, new = (r.stats.get(name, Stats()) for r in (readings[0], readings[-1]))
    before, now = old.inference_stats, new.inference_stats
    if now.success.count < before.success.count or new.execution_count < old.execution_count:
        return ModelEvidence(config, seconds, steps_of=steps_of, restarted=True)
    queue, success = _more(before.queue, now.queue), _more(before.success, now.success)
    hits = _more(before.cache_hit, now.cache_hit)  # counted in both, and they take next to nothing
    failures = [
        r.gauges.total(FAILURES, model=name, reason="REJECTED") for r in (readings[0], readings[-1])
    ]
    pending = [r.gauges.total(PENDING, model=name) for r in readings[1:]]
    return ModelEvidence(
        config,
        seconds,
        requests=success.count,
        rows=new.inference_count - old.inference_count,
        executions=new.execution_count - old.execution_count,
        queue_s=_mean_of(queue, hits.count),
        queue_sum_s=queue.ns / _NS,
        latency_s=_mean_of(success, hits.count),
        latency_sum_s=success.ns / _NS,
        sizes=sizes_between(old, new),
        rejected=int(_known(failures[1]) - _known(failures[0])),
        failed=max(now.fail.count - before.fail.count, 0),
        cache_hits=hits.count,
        pending=mean(pending),
        steps_of=steps_of,
    )


def sizes_between(old: Stats, new: Stats) -> tuple[SizeTime, ...]:
    """Return the executions by batch size between two readings."""
    before = {one.batch_size: one for one in old.batch_stats}
    found = []
    for one in new.batch_stats:
        then = before.get(one.batch_size)
        count = one.compute_infer.count - (then.compute_infer.count if then else 0)
        ns = one.ns - (then.ns if then else 0)
        if count > 0 and ns >= 0:
            found.append(SizeTime(one.batch_size, count, ns / _NS / count))
    return tuple(sorted(found, key=lambda one: one.batch))


def _static(reading: Reading) -> tuple[str, ...]:
    """Return the models that have only the metrics of static batching, not those of in-flight
    batching.
    """
    known = reading.gauges.models(REQUESTS)
    return tuple(m for m in reading.gauges.models(STATIC) if m not in known)


def _backend(model: str, watched: Watched) -> EngineEvidence:
    """Return the evidence in the TensorRT-LLM backend's gauges for one model."""
    readings, config = (
        watched.readings,
        watched.server.configs.get(model, TritonModelConfig(name=model)),
    )
    moved = _moved(model, readings)

    def at(name: str, label: str, kind: str) -> list[float]:
        return [r.gauges.total(name, model=model, **{label: kind}) for r in moved]

    def requests(kind: str) -> list[float]:
        return at(REQUESTS, "request_type", kind)

    def blocks(kind: str) -> list[float]:
        return at(BLOCKS, "kv_cache_block_type", kind)

    def batcher(kind: str) -> float:
        return mean(at(IN_FLIGHT, "inflight_batcher_specific_metric", kind))

    active, scheduled = requests("active"), requests("scheduled")
    waits = [max(a - s, 0.0) for a, s in zip(active, scheduled, strict=True)]
    most, held = mean(blocks("max")), mean(blocks("used"))
    # Copies of an engine may each show a sample with the same labels: counts add up, a size not.
    size = mean(r.gauges.most(BLOCKS, model=model, kv_cache_block_type="tokens_per") for r in moved)
    reused = [
        r.gauges.total(BLOCKS, model=model, kv_cache_block_type="reused")
        for r in (readings[0], readings[-1])
    ]
    prefill = batcher("total_context_tokens")
    return EngineEvidence(
        model,
        _known(mean(active)),
        _known(mean(scheduled)),
        _known(mean(waits)),
        most=mean(requests("max")),
        active_range=_range(active),
        scheduled_range=_range(scheduled),
        context=mean(requests("context")),
        generation=batcher("generation_requests"),
        context_tokens=prefill,
        paused=batcher("paused_requests"),
        kv_tokens=most * size,
        kv_share=held / most if most else math.nan,
        reused=reused[1] - reused[0],
        input_tokens=_mean_length(readings, INPUT_TOKENS, model),
        output_tokens=_mean_length(readings, OUTPUT_TOKENS, model),
        step_tokens=config.number("max_num_tokens"),
        static=model in readings[-1].gauges.models(STATIC),
        config=config,
        moving=bool(moved),
    )


def _moved(model: str, readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings since whose previous reading the engine has made a step. All other
    readings only repeat the previous figures.
    """

    def state(reading: Reading) -> object:
        steps = reading.gauges.total(GENERAL, model=model, general_type="iteration_counter")
        if not math.isnan(steps):
            return steps
        shown = (reading.gauges.by_name.get(name, ()) for name in (REQUESTS, BLOCKS, IN_FLIGHT))
        ours = [s.value for some in shown for s in some if s.labels.get("model") == model]
        stats = reading.stats.get(model)
        return ours, stats.inference_count if stats else 0

    moved = [now for before, now in pairwise(readings) if state(before) != state(now)]
    return _of_one_engine(model, moved)


def _of_one_engine(model: str, readings: list[Reading]) -> list[Reading]:
    """Return only the readings of the last engine if the engine was replaced during the watch. A
    new size shows the replacement, because the size of an engine does not change while the engine
    runs. If several copies of different sizes report in turn, all readings are kept.
    """
    sizes = [
        [s.value for s in r.gauges.by_name.get(BLOCKS, ()) if _is_size(s, model)] for r in readings
    ]
    begin = next((n for n, size in enumerate(sizes) if size == sizes[-1]), 0)
    return readings[begin:] if all(size == sizes[-1] for size in sizes[begin:]) else readings


def _is_size(sample: names.Sample, model: str) -> bool:
    kind = sample.labels.get("kv_cache_block_type")
    return sample.labels.get("model") == model and kind in ("max", "tokens_per")


def _vllm(watched: Watched) -> EngineEvidence:
    """Return the evidence about a vLLM engine, or about warmroute's engine, which uses vLLM's names
    and reports more.
    """
    readings, server = watched.readings, watched.server
    model = server.models[0] if server.models else server.kind
    running, waiting = _each(readings, names.RUNNING), _each(readings, names.WAITING)
    scheduled = [r.gauges.total(ENGINE_REQUESTS, kind="scheduled") for r in readings[1:]]
    active = [a + b for a, b in zip(running, waiting, strict=True)]
    last = readings[-1].gauges
    info = last.by_name.get(names.CACHE_CONFIG, ())
    size, count = (_label(info, name) for name in ("block_size", "num_gpu_blocks"))
    usage = _first(*(mean(_each(readings, n)) for n in (names.KV_USAGE, names.KV_USAGE_OLD)))
    reasons = _differences(readings, lambda g: g.split(NOT_SCHEDULED, "reason"))
    steps = _grown(readings, STEPS)
    prefill = _differences(readings, lambda g: g.split(STEP_TOKENS, "of")).get("prefill", math.nan)
    finished = _grown(readings, names.REQUEST_SUCCESS)
    config = server.configs.get(model, TritonModelConfig(name=model))
    ranges = scheduled if not math.isnan(mean(scheduled)) else running
    return EngineEvidence(
        model,
        _known(mean(active)),
        _known(mean(ranges)),
        _known(mean(waiting)),
        most=last.total(ENGINE_REQUESTS, kind="max"),
        active_range=_range(active),
        scheduled_range=_range(ranges),
        context_tokens=prefill / steps if steps else math.nan,
        preemptions=_known(_grown(readings, names.PREEMPTIONS)),
        kv_tokens=size * count,
        kv_share=usage,
        reused=_grown(readings, names.PREFIX_HITS),
        queried=_grown(readings, names.PREFIX_QUERIES),
        input_tokens=_per(_grown(readings, names.PROMPT_TOKENS), finished),
        output_tokens=_per(_grown(readings, names.GENERATION_TOKENS), finished),
        step_tokens=last.total(STEP_BUDGET),
        reasons=reasons,
        config=config,
        moving=any(one > 0 for one in active),
    )


def _sglang(watched: Watched) -> EngineEvidence:
    readings, server = watched.readings, watched.server
    running = _each(readings, SGLANG + "num_running_reqs")
    waiting = _each(readings, SGLANG + "num_queue_reqs")
    active = [a + b for a, b in zip(running, waiting, strict=True)]
    retracted = _each(readings, SGLANG + "num_retracted_reqs")
    last = readings[-1].gauges
    done = _grown(readings, SGLANG + "num_requests")
    return EngineEvidence(
        server.models[0] if server.models else server.kind,
        _known(mean(active)),
        _known(mean(running)),
        _known(mean(waiting)),
        most=_setting(server, "max_running_requests"),
        active_range=_range(active),
        scheduled_range=_range(running),
        paused=mean(retracted),
        kv_tokens=_first(
            last.total(SGLANG + "max_total_num_tokens"), _setting(server, "max_total_num_tokens")
        ),
        kv_share=mean(_each(readings, SGLANG + "token_usage")),
        reused=_grown(readings, SGLANG + "cached_tokens"),
        queried=_grown(readings, SGLANG + "prompt_tokens"),
        input_tokens=_per(_grown(readings, SGLANG + "prompt_tokens"), done),
        output_tokens=_per(_grown(readings, SGLANG + "generation_tokens"), done),
        moving=any(one > 0 for one in active),
    )


def router_evidence(looks: Sequence[Gauges]) -> RouterEvidence:
    """Return the evidence in a router's metrics, which were read at least twice."""
    info = looks[-1].by_name.get("warmroute_worker_info", ())
    urls = {s.labels.get("worker", ""): s.labels.get("url", "").rstrip("/") for s in info}
    by_url: dict[str, tuple[float, ...]] = {}
    refused: dict[str, float] = {}
    for worker, url in urls.items():
        each = [g.total("warmroute_worker_requests", worker=worker) for g in looks]
        before = by_url.get(url, (0.0,) * len(each))
        by_url[url] = tuple(_known(a) + b for a, b in zip(each, before, strict=True))
        counts = [_known(g.total("warmroute_replies", worker=worker, status="503")) for g in looks]
        refused[url] = refused.get(url, 0.0) + max(counts[-1] - counts[0], 0.0)
    flying = [_known(g.total("warmroute_inflight_requests")) for g in looks[1:]]
    prompt, hit = (
        looks[-1].total(name) - looks[0].total(name)
        for name in ("warmroute_prompt_tokens", "warmroute_expected_hit_tokens")
    )
    connections = mean([g.total("warmroute_server_connections") for g in looks[1:]])
    return RouterEvidence(
        connections, mean(flying), max(flying, default=0.0), by_url, refused, _per(hit, prompt)
    )


def mean(values: Iterable[float]) -> float:
    """Return the mean of the known values; NaN if none is known."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _more(before: Count, now: Count) -> Count:
    return Count(max(now.count - before.count, 0), max(now.ns - before.ns, 0))


def _mean_of(sums: Count, hits: int) -> float:
    count = sums.count - hits
    return sums.ns / _NS / count if count > 0 else 0.0


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _first(*values: float) -> float:
    return next((value for value in values if not math.isnan(value)), math.nan)


def _per(total: float, count: float) -> float:
    return total / count if count > 0 else math.nan


def _range(values: Sequence[float]) -> tuple[float, float]:
    known = [value for value in values if not math.isnan(value)]
    return (min(known), max(known)) if known else (math.nan, math.nan)


def _each(readings: Sequence[Reading], name: str) -> list[float]:
    """Return the values of a gauge in all readings except the first, which was made before the
    watch.
    """
    return [reading.gauges.total(name) for reading in readings[1:]]


def _grown(readings: Sequence[Reading], name: str) -> float:
    """Return by how much a counter grew; NaN if it is missing or was reset."""
    more = readings[-1].gauges.total(name) - readings[0].gauges.total(name)
    return more if more >= 0 else math.nan


def _differences(
    readings: Sequence[Reading], split: Callable[[Gauges], dict[str, float]]
) -> dict[str, float]:
    before, now = split(readings[0].gauges), split(readings[-1].gauges)
    return {key: max(value - before.get(key, 0.0), 0.0) for key, value in now.items()}


def _mean_length(readings: Sequence[Reading], name: str, model: str) -> float:
    sums, counts = (
        [r.gauges.total(f"{name}_{part}", model=model) for r in (readings[0], readings[-1])]
        for part in ("sum", "count")
    )
    found = _per(sums[1] - sums[0], counts[1] - counts[0])
    return found if found > 0 else _per(sums[1], counts[1])


def _label(samples: Iterable[names.Sample], name: str) -> float:
    for sample in samples:
        text = sample.labels.get(name, "")
        if text.isascii() and text.isdecimal() and len(text) <= 12:
            return float(text)
    return math.nan


def _setting(server: ExaminedServer, name: str) -> float:
    text = server.settings.get(name, "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else math.nan

"""Parses an engine's own data: its configuration, which is read once, and its figures, which are
read again and again. The functions are pure. Triton's data are `/v2/models/{m}/config`,
`/v2/models/stats` and Prometheus text (2.51 to 2.73). Values that are not numbers, negative or out
of range are refused with WireError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr, replace

from engine.wire import metrics as names
from engine.wire.events import WireError
from engine.wire.metrics import Sample, samples

T = TypeVar("T")
Number = Annotated[int, Meta(ge=0, le=10**18)]
MAX_MODELS = 64  # of one server that are looked at

REQUESTS = "nv_trt_llm_request_metrics"
BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
IN_FLIGHT = "nv_trt_llm_inflight_batcher_metrics"
STATIC = "nv_trt_llm_v1_metrics"
GENERAL = "nv_trt_llm_general_metrics"
INPUT_TOKENS, OUTPUT_TOKENS = "nv_llm_input_token_len", "nv_llm_output_token_len"
PENDING = "nv_inference_pending_request_count"
FAILURES = "nv_inference_request_failure"
DEVICE_USED, DEVICE_TOTAL = "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"
ENGINE_REQUESTS = "warmroute_engine_requests"
NOT_SCHEDULED = "warmroute_engine_not_scheduled"
STEPS, STEP_TOKENS = "warmroute_engine_steps", "warmroute_engine_step_tokens"
STEP_BUDGET = "warmroute_engine_step_budget_tokens"
SGLANG = "sglang:"
WANTED = frozenset(
    (
        *(REQUESTS, BLOCKS, IN_FLIGHT, STATIC, GENERAL, PENDING, FAILURES),
        *(f"{name}_{part}" for name in (INPUT_TOKENS, OUTPUT_TOKENS) for part in ("sum", "count")),
        *("nv_inference_request_success", "nv_inference_count", DEVICE_USED, DEVICE_TOTAL),
        *(names.RUNNING, names.WAITING, names.KV_USAGE, names.KV_USAGE_OLD, names.CACHE_CONFIG),
        *(names.PREFIX_QUERIES, names.PREFIX_HITS, names.PREEMPTIONS, names.REQUEST_SUCCESS),
        *(names.PROMPT_TOKENS, names.GENERATION_TOKENS),
        *(ENGINE_REQUESTS, NOT_SCHEDULED, STEPS, STEP_TOKENS, STEP_BUDGET),
        *(SGLANG + name for name in ("num_running_reqs", "num_queue_reqs", "token_usage")),
        *(SGLANG + name for name in ("max_total_num_tokens", "num_retracted_reqs")),
        *(SGLANG + name for name in ("prompt_tokens", "generation_tokens", "num_requests")),
        SGLANG + "cached_tokens",
    )
)
# Of our own router, by its admin port.
ROUTER_WANTED = frozenset(
    f"warmroute_{name}"
    for name in (
        *("worker_info", "worker_requests", "replies", "server_connections", "inflight_requests"),
        *("prompt_tokens", "expected_hit_tokens", "reported_prompt_tokens", "reported_hit_tokens"),
    )
)


class Count(msgspec.Struct, frozen=True):
    """A number of requests in Triton's statistics, and their total time in nanoseconds."""

    count: Number = 0
    ns: Number = 0


class Tensor(msgspec.Struct, frozen=True):
    """An input tensor in the configuration of a Triton model."""

    name: str = ""
    data_type: str = ""
    dims: list[int] = []
    allow_ragged_batch: bool = False
    optional: bool = False


class Queue(msgspec.Struct, frozen=True):
    """The policy of a model's queue for waiting requests."""

    timeout_action: str | int = "REJECT"
    default_timeout_microseconds: Number = 0
    max_queue_size: Number = 0


class Dynamic(msgspec.Struct, frozen=True):
    """The field `dynamic_batching` of a model's configuration."""

    preferred_batch_size: list[int] = []
    max_queue_delay_microseconds: Number = 0
    default_queue_policy: Queue | None = None
    priority_queue_policy: dict[str, Queue] = {}

    @property
    def policies(self) -> list[Queue]:
        """The queue policies of all priority levels of the model."""
        first = [self.default_queue_policy] if self.default_queue_policy else []
        return first + list(self.priority_queue_policy.values())


class Oldest(msgspec.Struct, frozen=True):
    """The field `sequence_batching.oldest` of a model's configuration."""

    max_candidate_sequences: Number = 0


class SequenceBatching(msgspec.Struct, frozen=True):
    """The field `sequence_batching` of a model's configuration."""

    max_sequence_idle_microseconds: Number = 1_000_000
    oldest: Oldest | None = None


class Group(msgspec.Struct, frozen=True):
    """An element of the field `instance_group` of a model's configuration."""

    count: Number = 1  # on each of its devices
    kind: str | int = ""
    gpus: list[int] = []
    rate_limiter: dict[str, Any] | None = None


class Step(msgspec.Struct, frozen=True):
    """A step of an ensemble, which runs one model."""

    model_name: str = ""


class Ensemble(msgspec.Struct, frozen=True):
    """The field `ensemble_scheduling` of a model's configuration."""

    step: list[Step] = []


class Transaction(msgspec.Struct, frozen=True):
    """The field `model_transaction_policy` of a model's configuration."""

    decoupled: bool = False


class Parameter(msgspec.Struct, frozen=True):
    """An element of the field `parameters` of a model's configuration."""

    string_value: str = ""


class TritonModelConfig(msgspec.Struct, frozen=True):
    """The configuration of a Triton model, to which Triton has added its defaults."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    max_batch_size: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    input: list[Tensor] = []
    instance_group: list[Group] = []
    dynamic_batching: Dynamic | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: Ensemble | None = None
    model_transaction_policy: Transaction = Transaction()
    parameters: dict[str, Parameter] = {}

    def __post_init__(self) -> None:
        """Remove the preferred batch size that Triton adds if none is configured."""
        batcher = self.dynamic_batching
        if batcher is not None and batcher.preferred_batch_size == [self.max_batch_size]:
            written = replace(batcher, preferred_batch_size=[])
            force_setattr(self, "dynamic_batching", written)

    @property
    def instances(self) -> int:
        """The number of instances over all groups and their devices, at least 1."""
        return max(1, sum(group.count * max(len(group.gpus), 1) for group in self.instance_group))

    @property
    def devices(self) -> int:
        """The number of devices that the configuration names for the instances, at least 1."""
        named = {gpu for group in self.instance_group for gpu in group.gpus}
        # TensorRT-LLM's: a set of devices for each instance.
        sets = (self.text("gpu_device_ids") or "").strip(";").split(";")
        return max(len(named), len(sets))

    @property
    def steps(self) -> list[str]:
        """The models of an ensemble, in order."""
        return [step.model_name for step in (self.ensemble_scheduling or Ensemble()).step]

    def text(self, name: str) -> str | None:
        """Return the value of a parameter as text, or None if it is missing or still an unfilled
        template.
        """
        value = self.parameters.get(name)
        if value is None or "${" in value.string_value or not value.string_value.strip():
            return None
        return value.string_value.strip()

    def number(self, name: str) -> float:
        """Return the value of a parameter as a number of 0 or more; NaN if the value is no such
        number.
        """
        try:
            value = float(self.text(name) or "nan")
        except ValueError:
            return math.nan
        return value if 0 <= value < math.inf else math.nan


class InferenceStatistics(msgspec.Struct, frozen=True):
    """The field `inference_stats` of Triton's statistics, which has sums over requests."""

    success: Count = Count()
    fail: Count = Count()
    queue: Count = Count()
    compute_input: Count = Count()
    compute_infer: Count = Count()
    compute_output: Count = Count()
    cache_hit: Count = Count()


class BatchStats(msgspec.Struct, frozen=True):
    """The sums over all executions of one batch size."""

    batch_size: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    compute_input: Count = Count()
    compute_infer: Count = Count()
    compute_output: Count = Count()

    @property
    def ns(self) -> int:
        """The total time of the executions in nanoseconds."""
        return self.compute_input.ns + self.compute_infer.ns + self.compute_output.ns


class Stats(msgspec.Struct, frozen=True):
    """A model's statistics since it was loaded; its warm-up is included."""

    name: str = ""
    version: str = ""
    inference_count: Number = 0
    execution_count: Number = 0
    inference_stats: InferenceStatistics = InferenceStatistics()
    batch_stats: list[BatchStats] = []


class AllStats(msgspec.Struct, frozen=True):
    """The statistics of all models in Triton's answer to `/v2/models/stats`."""

    model_stats: list[Stats] = []


@dataclass(frozen=True, slots=True)
class Gauges:
    """The samples of one page of metrics, by name."""

    by_name: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels; NaN if there is none."""
        wanted = labels.items()
        found = [s.value for s in self.by_name.get(name, ()) if wanted <= s.labels.items()]
        return math.fsum(found) if found else math.nan

    def most(self, name: str, **labels: str) -> float:
        """Return the largest of the samples with these labels; NaN if there is none."""
        wanted = labels.items()
        found = [s.value for s in self.by_name.get(name, ()) if wanted <= s.labels.items()]
        return max(found, default=math.nan)

    def split(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums of the samples by the values of `label`."""
        found: dict[str, float] = {}
        for sample in self.by_name.get(name, ()):
            if labels.items() <= sample.labels.items() and label in sample.labels:
                key = sample.labels[label]
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def models(self, name: str) -> tuple[str, ...]:
        """Return the values of the label `model` in the samples of this metric, in order."""
        return tuple(dict.fromkeys(s.labels.get("model", "") for s in self.by_name.get(name, ())))


@dataclass(frozen=True, slots=True)
class Reading:
    """All figures of one server that were read at one time."""

    at_s: float
    gauges: Gauges = Gauges()
    stats: Mapping[str, Stats] = field(default_factory=dict)  # by model and version


@dataclass(frozen=True, slots=True)
class ExaminedServer:
    """A server whose kind was recognized, and its configuration."""

    url: str
    kind: str  # triton, vllm, sglang, warmroute
    version: str = ""
    configs: Mapping[str, TritonModelConfig] = field(default_factory=dict)  # by model
    settings: Mapping[str, str] = field(default_factory=dict)  # of engines that are no Triton
    models: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()  # figures that it did not report, for the report


@dataclass(frozen=True, slots=True)
class Watched:
    """A server and at least two readings of it, in the order of time."""

    server: ExaminedServer
    readings: tuple[Reading, ...]


def parse_json(body: bytes, kind: type[T], what: str) -> T:
    """Return `body` as `kind`, with numbers in quotes allowed. Raises WireError, which begins with
    `what`, if it is malformed.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{what}: {error}") from error


def parse_gauges(text: str, wanted: frozenset[str] = WANTED) -> Gauges:
    """Return the wanted samples of a page of metrics. Raises WireError, which names the line, if a
    sample is malformed.
    """
    found: dict[str, list[Sample]] = {}
    for sample in samples(text, wanted):
        found.setdefault(sample.name, []).append(sample)
    return Gauges({name: tuple(some) for name, some in found.items()})


def parse_stats(body: bytes, what: str) -> dict[str, Stats]:
    """Return the statistics by model; if a model has several versions, return those of the version
    that ran most. Raises WireError if the statistics are malformed.
    """
    found: dict[str, Stats] = {}
    for stats in parse_json(body, AllStats, what).model_stats:
        before = found.get(stats.name)
        if before is None or stats.inference_count > before.inference_count:
            found[stats.name] = stats
    return found

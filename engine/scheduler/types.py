"""The scheduler's settings, steps, outputs and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from engine.scheduler.request import FinishReason, Request

BatchPolicy = Literal["max_utilization", "guaranteed_no_evict"]
POLICY_LIMITS = (
    ("max_queue_delay_microseconds", 10_000_000),
    ("length_ageing_s", 3600.0),
    ("tpot_target_ms", 60_000.0),
    ("pinned_share", 0.9),
)
MAX_LEASE_S = 3600.0
LEAST = (
    *(("max_batch_size", 1), ("min_chunk_tokens", 1), ("max_queue", 1)),
    *(("max_model_tokens", 2), ("prefix_wait_tokens", 0), ("max_exports", 0)),
)
Refusal = Literal["empty_prompt", "no_output", "too_long", "kv_capacity", "queue_full"]


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """Raised for a request that can never run, or that cannot run now. `reason` is a code,
    `message` is for people.
    """

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason: Refusal = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The limits of one worker; lifetime: worker. Raises ValueError for values out of range.

    A step computes at most `max_num_tokens` tokens, which is at least `max_batch_size`, the number
    of requests that run at once. `max_model_tokens` is the greatest length of prompt plus output.
    No request is admitted with a smaller piece of its prompt than `min_chunk_tokens`. `watermark`
    is the share of the blocks, in [0, 1), that an admission leaves available for decodes to grow.
    `ageing_s` is how many seconds of waiting are worth one priority level. At most `max_queue`
    requests wait; others are refused. A request waits for a prefix of at least `prefix_wait_tokens`
    tokens while another request computes it; 0: never.

    `batch_scheduler_policy` is as in TensorRT-LLM: max_utilization admits what fits now and
    preempts when decodes outgrow the cache; guaranteed_no_evict admits a request only with room for
    its whole output, and preempts nobody. `max_queue_delay_microseconds` (0..10^7) is as in Triton:
    how long an idle engine waits to fill its first step. `length_ageing_s` is how many seconds of
    waiting 1000 prompt tokens count for, so that short prompts go first and long ones still have
    their turn; 0: in order of arrival. With `tpot_target_ms`, prompts take only so much of a step
    that decodes keep this time per token; 0: no such limit. `tenant_share`, in (0, 1], is the share
    of the blocks that the requests of one tenant may take while they run, beyond its first request.
    `pinned_share`, in [0, 0.9], is the share of the blocks that may be pinned, and that no single
    request may count on. `export_lease_s` is for how many seconds a prompt's KV is held for a
    worker that has not asked for it yet. At most `max_exports` prompts have their KV held for other
    workers at a time; the KV of further prompts is not offered.
    """

    max_num_tokens: int = 8192
    max_batch_size: int = 256
    max_model_tokens: int = 131_072
    min_chunk_tokens: int = 16
    watermark: float = 0.01
    ageing_s: float = 10.0
    max_queue: int = 4096
    prefix_wait_tokens: int = 256
    batch_scheduler_policy: BatchPolicy = "max_utilization"
    max_queue_delay_microseconds: int = 0
    length_ageing_s: float = 0.0
    tpot_target_ms: float = 0.0
    tenant_share: float = 1.0
    pinned_share: float = 0.0
    export_lease_s: float = 30.0
    max_exports: int = 1024

    @property
    def reserves_outputs(self) -> bool:
        """True if no request is admitted without room for its whole output."""
        return self.batch_scheduler_policy == "guaranteed_no_evict"

    def __post_init__(self) -> None:
        for name, least in LEAST:
            if getattr(self, name) < least:
                text = "0 or more" if least == 0 else f"at least {least}"
                raise ValueError(f"{name} must be {text}, got {getattr(self, name)}")
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens ({self.max_num_tokens}) must be at least max_batch_size "
                f"({self.max_batch_size}), or decodes would not fit one step"
            )
        if self.min_chunk_tokens > self.max_num_tokens:
            raise ValueError(
                f"min_chunk_tokens ({self.min_chunk_tokens}) must be at most max_num_tokens "
                f"({self.max_num_tokens}), or no long prompt would ever start"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if not 0.0 < self.ageing_s < float("inf"):
            raise ValueError(f"ageing_s must be above 0 and finite, got {self.ageing_s}")
        if self.batch_scheduler_policy not in get_args(BatchPolicy):
            raise ValueError(
                f"batch_scheduler_policy must be one of {', '.join(get_args(BatchPolicy))}, "
                f"got {self.batch_scheduler_policy!r}"
            )
        if not 0.0 < self.export_lease_s <= MAX_LEASE_S:
            raise ValueError(
                f"export_lease_s must be above 0 and at most {MAX_LEASE_S:g}, got "
                f"{self.export_lease_s}"
            )
        for name, most in POLICY_LIMITS:
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be 0..{most:g}, got {getattr(self, name)}")
        if not 0.0 < self.tenant_share <= 1.0:
            raise ValueError(f"tenant_share must be above 0 and at most 1, got {self.tenant_share}")


class Read(NamedTuple):
    """A read of the KV of a request's tokens `start`..`stop`, which is not on the GPU but at
    `source`: another worker, or the host. The first `start` tokens are cached on the GPU. If `stop`
    is at most `start`, nothing is to be read and the request has begun.
    """

    request: Request
    start: int
    stop: int
    source: Literal["peer", "host"] = "peer"


class Chunk(NamedTuple):
    """A part of a request's prefill: tokens `start`..`start + tokens`, after `start` tokens of
    context.
    """

    request: Request
    start: int
    tokens: int


@dataclass(slots=True)
class Step:
    """The work of one step; lifetime: from `schedule` to `complete`. Its sums determine how long
    the step takes.
    """

    number: int  # counted from 0
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_ctx_tokens: int = 0  # KV tokens read by the decodes, their own included
    attention_pairs: float = 0.0  # sum over chunks of tokens * (start + tokens / 2)

    def add_chunk(self, request: Request, budget: int) -> int:
        """Add as much of the request's prefill as `budget` tokens allow, and return that number of
        tokens.
        """
        start = request.scheduled_tokens
        tokens = min(budget, request.prefill_target - start)
        self.chunks.append(Chunk(request, start, tokens))
        self.prefill_tokens += tokens
        self.attention_pairs += tokens * (start + tokens / 2)
        return tokens

    @property
    def prefill_seqs(self) -> int:
        """The number of requests with a chunk of prefill."""
        return len(self.chunks)

    @property
    def decode_seqs(self) -> int:
        """The number of requests with one token of decode."""
        return len(self.decodes)

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token from this step: decodes, then chunks that end a prefill."""
        ends = [
            chunk.request
            for chunk in self.chunks
            if chunk.start + chunk.tokens == chunk.request.prefill_target
        ]
        return self.decodes + ends


@dataclass(slots=True)
class StepSplit:
    """The seconds that each part of a runner's last step took, and how the step ran. Lifetime:
    step.
    """

    schedule_s: float = 0.0  # choosing the batch
    compute_s: float = 0.0  # the model, or the modelled wait
    complete_s: float = 0.0  # tokens taken in, blocks published
    modelled_s: float | None = None  # the prediction of a step-time model
    graph: str | None = None  # hit: of a graph; else why not; None: there are no graphs
    padded_rows: int = 0  # rows of the graph without a request
    int8: str | None = None  # the backend of INT8 weights; None: there are none
    shared_prefix_groups: int = 0  # runs of tokens whose KV several decodes read once
    kv_bytes_saved: int = 0  # by that, in all layers


class Output(NamedTuple):
    """One token of a request; `finished` says why it was the last one."""

    request: Request
    token: int
    finished: FinishReason | None


def refuse_hopeless(request: Request, settings: SchedulerSettings, sequence_tokens: int) -> None:
    """Raise Refused for a request that could not run even in an empty engine. `sequence_tokens` is
    the greatest length of prompt plus output that both the model and the KV cache take.
    """
    prompt_tokens = request.prompt_tokens
    if not prompt_tokens:
        raise Refused("empty_prompt", "the prompt has no tokens")
    if request.max_output_tokens < 1:
        raise Refused(
            "no_output", f"max_output_tokens must be at least 1, got {request.max_output_tokens}"
        )
    if prompt_tokens + 1 > settings.max_model_tokens:
        raise Refused(
            "too_long",
            f"the prompt has {prompt_tokens} tokens; prompt and output together may have "
            f"{settings.max_model_tokens}",
        )
    if prompt_tokens + 1 > sequence_tokens:
        raise Refused(
            "kv_capacity",
            f"the prompt has {prompt_tokens} tokens; the KV cache holds {sequence_tokens}, "
            "the first output token's included",
        )

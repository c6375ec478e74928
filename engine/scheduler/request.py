"""One request inside an engine: its tokens, its progress, and the blocks it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.block_pool import Retention
from engine.pins import Export
from engine.sampling.params import SamplingParams
from kvkernels import chain_hashes

Tokens = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "timeout", "error"]
MAX_REASONS = 32  # most reasons kept of one request, for questions why it waits


class State(Enum):
    """The state of a request. A state follows the one before it in this list, except that a
    preempted request goes from running to waiting, and a request whose KV did not arrive from
    reading to waiting.
    """

    WAITING = "waiting"
    READING = "reading"  # its blocks are reserved, and KV from elsewhere is written into them
    RUNNING = "running"
    FINISHED = "finished"


class Reason(Enum):
    """The reasons why a waiting request was not scheduled."""

    KV_BLOCKS = "kv_blocks"  # its whole prompt plus the watermark does not fit the free blocks
    TOKEN_BUDGET = "token_budget"  # the step's tokens are spent
    MAX_BATCH_SIZE = "max_batch_size"  # as many requests run as may
    PRIORITY = "priority"  # a request before it in the queue waits for blocks
    PREFIX_IN_FLIGHT = "prefix_in_flight"  # a running request is computing its prefix
    RESERVE_POLICY = "reserve_policy"  # its prompt would fit, its whole output does not
    TENANT_SHARE = "tenant_share"  # its tenant holds as many blocks as it may
    QUEUE_DELAY = "queue_delay"  # an idle engine waits for more requests to start with
    KV_TRANSFER = "kv_transfer"  # its prompt's KV is on its way from another worker, or the host


@dataclass(slots=True, eq=False)
class Request:
    """One request; lifetime: request. Only the scheduler changes it after `Scheduler.add`.

    `chain` has the chain hashes of the full blocks of prompt and output; if it is empty, the
    scheduler computes it from `prompt` and `seed` (uint64, kvkernels.chain_seed). Raises TypeError
    for a prompt that is not a contiguous one-dimensional int32 array.
    """

    request_id: int
    prompt: Tokens  # int32[prompt tokens]
    max_output_tokens: int
    priority: int = 0  # lower is served first
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    chain: list[int] = field(default_factory=list)
    sampling: SamplingParams | None = None  # None: the runner needs none, or takes the likeliest
    deadline_s: float = float("inf")  # it ends with "timeout" when this has come
    tenant: str = ""
    retention: Retention | None = None  # the worth of its blocks; None: as much as others
    imports: bool = False  # another worker has its prompt's KV; false from its start on
    exports: bool = False  # another worker will read its prompt's KV when it has ended
    exports_early: bool = False  # or while it is computed
    export_name: str | None = None  # as of `Export.name`

    arrival_s: float = 0.0  # when it was added
    token_limit: int = 0  # prompt and output together, set when it is added
    started_s: float | None = None  # when it was first admitted
    first_token_s: float | None = None
    state: State = State.WAITING
    reason: Reason | None = None  # set while it waits and was looked at
    reasons: list[tuple[Reason | None, float]] = field(default_factory=list)  # see `note`
    output: list[int] = field(default_factory=list)  # tokens given so far
    cached_tokens: int = 0  # prompt tokens found in the cache, or host, at the first admission
    computed_tokens: int = 0  # leading tokens whose KV is in `block_ids`
    scheduled_tokens: int = 0  # the same when the steps in flight have ended
    last_step: int = -1  # number of the latest step that has it
    read_target: int = 0  # while it reads: the leading tokens whose KV it then has
    host_blocks: int = 0  # while it reads: blocks that it loads from the host
    prefill_target: int = 0  # tokens to compute before the next one is sampled by a prefill
    preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    group_ids: Sequence[int] = ()  # blocks that its windows and states take
    ends: Sequence[int] = ()  # in blocks: it will leave such ones there
    own_blocks: int = 0  # of all these, ones that were not cached when it was admitted
    visible_blocks: int = 0  # leading blocks of `block_ids` that are published
    epoch: int = 0  # of the pool, at admission
    finish_reason: FinishReason | None = None
    export: Export | None = None  # where `exports`: early, or when it has ended in the normal way
    queue_key: tuple[int, float, int] = (1, 0.0, 0)  # smaller is served first; see Scheduler

    def __post_init__(self) -> None:
        prompt = self.prompt
        if prompt.ndim != 1 or prompt.dtype != np.int32 or not prompt.flags.c_contiguous:
            raise TypeError(
                f"prompt must be a contiguous int32 vector, got {prompt.dtype} {prompt.shape}"
            )

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt)

    @property
    def total_tokens(self) -> int:
        """Number of tokens of the prompt and of the output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def is_prefilling(self) -> bool:
        """True if the request runs, and its next token needs the KV of more tokens than its last
        one.
        """
        return self.computed_tokens < self.prefill_target

    def token(self, at: int) -> int:
        """Return the token at position `at` of prompt and output joined."""
        in_output = at - len(self.prompt)
        return self.output[in_output] if in_output >= 0 else int(self.prompt[at])

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return int32[stop - start]: the tokens `start`..`stop` of prompt and output joined."""
        prompt_tokens = len(self.prompt)
        if stop <= prompt_tokens:
            return self.prompt[start:stop]
        tail = np.array(
            self.output[max(0, start - prompt_tokens) : stop - prompt_tokens], dtype=np.int32
        )
        return np.concatenate((self.prompt[start:], tail)) if start < prompt_tokens else tail

    def note(self, reason: Reason | None, now_s: float) -> None:
        """Record that the request waits for `reason` from `now_s` on, or that it runs (None). The
        latest MAX_REASONS are kept.
        """
        if reason is self.reason and self.reasons:
            return
        self.reason = reason
        self.reasons.append((reason, now_s))
        if len(self.reasons) > MAX_REASONS:
            del self.reasons[0]

    def end_with(self, token: int) -> FinishReason | None:
        """Return why the request ends with `token`, the latest token of its output; None if it
        continues.
        """
        if token in self.stop_tokens:
            return "stop"
        return "length" if self.computed_tokens + 1 >= self.token_limit else None

    def extend_chain(self, full_blocks: int, block_size: int) -> None:
        """Extend `chain` until it covers `full_blocks` blocks of prompt and output."""
        known = len(self.chain)
        if known >= full_blocks:
            return
        parent = self.chain[-1] if known else self.seed
        tokens = self.tokens(known * block_size, full_blocks * block_size)
        self.chain.extend(chain_hashes(tokens.data, block_size, parent).tolist())

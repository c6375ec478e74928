"""The core's bounds and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NO_LIMIT = 1 << 40

# Whether a request goes to two workers: where that gives its first token sooner, wherever it can,
# or never.
DisaggregationMode = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """All limits of the decision core, with safe defaults. Times are in seconds."""

    max_workers: int = 256  # worker slots of the index; at most 4,096
    index_entries: int = 1 << 21  # distinct blocks the index remembers
    index_bytes: int = 1 << 30  # and what it may take for them
    speculative_entries: int = 1 << 20  # distinct blocks each generation of expectations remembers
    mirrored_blocks: int = 1 << 22  # remembered of workers without events, all together
    inflight_requests: int = 16_384  # dispatched and held together
    peer_requests: int = 1 << 16  # of all peers together, dispatched to workers that we share
    hold_requests: int = 1_024
    queued_tokens: int = NO_LIMIT  # of prompts, to be computed: dispatched and held together
    worker_requests: int = NO_LIMIT  # unfinished ones of ours at one worker, beyond which we wait
    worker_queued_tokens: int = NO_LIMIT  # of prompts sent to one worker and not computed, the same
    hold_s: float = 300.0
    sessions: int = 1 << 17  # followed at once, for policies that ask about them
    session_blocks: int = 1 << 20  # and blocks of their prompts
    speculative_s: float = 10.0  # an expected block nobody confirmed is forgotten after this
    max_attempts: int = 3  # workers that may fail one request; those not reached do not count
    retry_base_s: float = 0.025  # most that a first retry waits; doubles with every further one
    retry_max_s: float = 0.25  # and never beyond this
    retry_share: float = 0.2  # retries are at most this share of requests ...
    retries_per_s: float = 10.0  # ... and this many besides
    busy_s: float = 0.5  # a worker that says it is busy, and not for how long, is spared for this
    busy_max_s: float = 5.0  # and for at most this, whatever it says
    ejection_failures: int = 3  # failures in a row that eject a worker
    ejection_breaks: int = 8  # or answers broken off, beyond what those that end make good
    ejection_rate: float = 0.5  # or this share of failures, both of them ...
    ejection_requests: int = 20  # ... among at least so many ...
    ejection_window_s: float = 5.0  # ... within so long
    ejection_max_share: float = 0.5  # of a pool's ready workers that may be ejected at once
    panic_share: float = 0.5  # more of a model's ready workers silent at once: nothing moves
    recover_s: float = 2.0  # shortest ejection; doubles up to 16 times while it keeps failing
    stall_s: float = 0.5  # silence of all streams of a worker after which it is probed
    parked_blocks: int = 65_536  # stored blocks of one worker whose parent has not been seen
    backlog_batches: int = 10_000  # batches of one worker kept while a gap is filled
    disaggregation: DisaggregationMode = "auto"  # of pools whose workers have roles
    tpot_s: float = 0.0  # time per token that clients of such pools accept; 0: unknown
    slow_start_s: float = 0.0  # a worker that joins a running pool has its whole share after this
    signal_stale_s: float = 5.0  # others' load in a report older than this is no longer believed
    policy_fallback: str = "least_requests"  # decides where the policy fails; never fails itself
    policy_slow_s: float = 0.005  # a call of the policy that takes longer is a fault
    retry_after_s: float = 1.0  # told to clients that are turned away for want of capacity

"""The settings of the decision core: its limits and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NO_LIMIT = 1 << 40

# When a request goes to two workers: if that gives its first token sooner, whenever it is possible,
# or never.
DisaggregationMode = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """All limits of the decision core, with safe defaults. Times are in seconds."""

    max_workers: int = 256  # worker slots of the index; at most 4,096
    index_entries: int = 1 << 21  # most distinct blocks that the index remembers
    index_bytes: int = 1 << 30  # most memory of the index
    speculative_entries: int = 1 << 20  # most distinct expected blocks of each generation
    mirrored_blocks: int = 1 << 22  # most remembered blocks of all workers without events together
    inflight_requests: int = 16_384  # dispatched and held together
    # Most requests of all peers at workers that this router shares with them.
    peer_requests: int = 1 << 16
    hold_requests: int = 1_024
    queued_tokens: int = NO_LIMIT  # of prompts, to be computed: dispatched and held together
    worker_requests: int = NO_LIMIT  # most unfinished own requests at one worker; further ones wait
    # Most prompt tokens sent to one worker and not computed; further ones wait.
    worker_queued_tokens: int = NO_LIMIT
    hold_s: float = 300.0
    sessions: int = 1 << 17  # most sessions tracked at once, for policies that need them
    session_blocks: int = 1 << 20  # most blocks of their prompts
    speculative_s: float = 10.0  # after this an expected block without confirmation is forgotten
    max_attempts: int = 3  # workers that may fail one request; unreachable ones do not count
    retry_base_s: float = 0.025  # longest wait before a first retry; doubles with every further one
    retry_max_s: float = 0.25  # longest wait before any retry
    retry_share: float = 0.2  # retries are at most this share of requests ...
    retries_per_s: float = 10.0  # ... plus this many per second
    busy_s: float = 0.5  # a worker that is busy for an unknown time is spared for this long
    busy_max_s: float = 5.0  # longest time that a busy worker is spared, whatever it asks for
    ejection_failures: int = 3  # failures in a row that eject a worker
    # Broken answers that eject a worker, less those that complete answers offset.
    ejection_breaks: int = 8
    ejection_rate: float = 0.5  # share of failures that ejects a worker ...
    ejection_requests: int = 20  # ... among at least this many requests ...
    ejection_window_s: float = 5.0  # ... within this time
    ejection_max_share: float = 0.5  # most of a pool's ready workers that may be ejected at once
    # If a larger share of a model's ready workers is silent, no request moves.
    panic_share: float = 0.5
    recover_s: float = 2.0  # shortest ejection; doubles up to 16 times while it keeps failing
    stall_s: float = 0.5  # time without a token in all streams of a worker after which it is probed
    parked_blocks: int = 65_536  # most stored blocks of one worker whose parent is unknown
    backlog_batches: int = 10_000  # most batches of one worker kept while a gap is filled
    disaggregation: DisaggregationMode = "auto"  # for pools whose workers have roles
    tpot_s: float = 0.0  # time per token that clients of these pools accept; 0: unknown
    slow_start_s: float = 0.0  # time until a worker that joins a running pool has its whole share
    signal_stale_s: float = 5.0  # oldest report of other clients' load that counts
    policy_fallback: str = "least_requests"  # decides if the policy fails; never fails itself
    policy_slow_s: float = 0.005  # a call of the policy that takes longer is a fault
    retry_after_s: float = 1.0  # shortest Retry-After of a refusal for lack of capacity

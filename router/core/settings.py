"""The decision core's bounds and times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Every bound of the core, with safe defaults. Times in seconds."""

    max_workers: int = 256  # worker slots of the index; at most 4,096
    index_entries: int = 1 << 21  # distinct blocks the index remembers
    index_bytes: int = 1 << 30  # and what it may take for them
    speculative_entries: int = 1 << 20  # distinct blocks each generation of expectations remembers
    mirrored_blocks: int = 1 << 22  # remembered of workers without events, all together
    inflight_requests: int = 16_384  # dispatched and held together
    hold_requests: int = 1_024
    hold_s: float = 300.0
    sessions: int = 1 << 17  # followed at once, for policies that ask about them
    session_blocks: int = 1 << 20  # and blocks of their prompts
    speculative_s: float = 10.0  # an expected block nobody confirmed is forgotten after this
    max_attempts: int = 3  # workers tried for one request
    ejection_failures: int = 3  # failures in a row that put a worker aside
    recover_s: float = 2.0  # shortest time aside; doubles up to 16 times while it keeps failing
    parked_blocks: int = 65_536  # stored blocks of one worker whose parent has not been seen
    backlog_batches: int = 10_000  # batches of one worker kept while a gap is filled
    signal_stale_s: float = 5.0  # others' load in a report older than this is no longer believed
    policy_fallback: str = "least_requests"  # decides where the policy fails; never fails itself
    policy_slow_s: float = 0.005  # a call of the policy that takes longer is a fault
    retry_after_s: float = 1.0  # told to clients that are turned away for want of capacity

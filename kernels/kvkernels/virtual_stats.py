"""The statistics of a virtual worker. The Python and the native implementation return the same
type.
"""

from __future__ import annotations

from typing import NamedTuple


class WorkerStats(NamedTuple):
    """The statistics of one virtual worker. Lifetime: one call. Totals count from the worker's
    start, and an `abort` does not reset them.
    """

    busy_ns: int  # in steps, the part of the one in flight included
    steps: int  # the one in flight included
    running: int  # requests that hold blocks
    waiting: int  # requests in the queue, preempted ones included
    used_blocks: int  # held by running requests
    evicted: int  # blocks dropped to make room
    preemptions: int
    recomputed_tokens: int  # computed a second time after a preemption
    query_tokens: int  # prompt tokens of first admissions
    hit_tokens: int  # those of them found on the GPU
    host_blocks: int  # held in host memory
    host_hit_tokens: int  # prompt tokens of first admissions that were loaded from there

"""What one replay gave: a table of requests, samples over time, counters. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from simulator.replay.setup import Setup
from simulator.traces.stream import Stage

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]


class Verdict(IntEnum):
    """How a request ended."""

    COMPLETED = 0
    REJECTED = 1  # turned away by the router or refused by the worker
    FAILED = 2  # its worker died after the first token: to the client it is lost


NEVER = -1  # a time that did not come, a worker that was not


@dataclass(frozen=True, slots=True)
class RequestTable:
    """One row per request, in order of arrival. Times: ns of virtual time, or `NEVER`."""

    arrival_ns: I64  # when it reached the router
    dispatched_ns: I64  # when it was last sent to a worker
    first_token_ns: I64  # when the client had it
    finish_ns: I64  # when the client had the last token
    prompt_tokens: I32
    output_tokens: I32  # given, not asked for
    prompt_blocks: I32  # full ones
    expected_hit_tokens: I32  # as the router saw it when it dispatched
    hit_tokens: I32  # as the worker found it when it first admitted the request
    worker: I32  # the last one
    attempts: npt.NDArray[np.int16]  # dispatches
    verdict: npt.NDArray[np.int8]
    held_ns: I64  # from the arrival to the first dispatch, or to the refusal of who had none
    session: I32  # number of its session, counted from 0 as they began; `NEVER`: it has none

    def __len__(self) -> int:
        return len(self.arrival_ns)


@dataclass(frozen=True, slots=True)
class Samples:
    """The pool over time, `[samples]` or `[samples, workers]`."""

    time_ns: I64
    busy_share: npt.NDArray[np.float64]  # since the sample before
    running: I32
    waiting: I32
    used_blocks: I32
    query_tokens: I64  # prompt tokens of admitted requests, since the start, per worker
    hit_tokens: I64  # of these, found in the cache


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """One worker, from start to end."""

    name: str
    requests: int  # dispatched to it
    busy_ns: int
    steps: int
    evicted_blocks: int
    recomputed_tokens: int  # computed a second time after a preemption
    preemptions: int
    query_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that many requests share, and how many workers held it over time."""

    blocks: int  # its length
    requests: int  # that began with it
    copies: npt.NDArray[np.int32]  # per sample; `NEVER`: not followed then


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Lifetime: process."""

    setup: Setup
    policy: str  # resolved name
    params: dict[str, str | int | float | bool]
    block_size: int
    table: RequestTable
    samples: Samples
    workers: tuple[WorkerTotals, ...]
    rejections: dict[str, int]  # by the answer's code
    retries: int
    holds: int
    trace_errors: int  # wrong lines that were left out
    simulated_ns: int  # from the first arrival to the last end
    wall_s: float  # of the machine, reading included
    hot: tuple[HotPrefix, ...] = ()
    notes: tuple[str, ...] = field(default=())  # for people: what to know of this run
    stages: tuple[Stage, ...] = ()  # of a ladder of loads, in order of time

"""The result of one replay: a table of requests, samples over time, and counters."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.replay.setup import Setup
from simulator.traces.job import Stage

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]


WARNING = "warning: "  # begins a note that the figures cannot be trusted


class Verdict(IntEnum):
    """The way in which a simulated request ended."""

    COMPLETED = 0
    REJECTED = 1  # turned away by the router or refused by the worker
    FAILED = 2  # its worker died after the first token: to the client it is lost


NEVER = -1  # no such time, worker or session


@dataclass(frozen=True, slots=True)
class RequestTable:
    """The results of all requests, with one row per request in order of arrival. Times are ns of
    virtual time, or `NEVER`.
    """

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
    held_ns: I64  # from the arrival to the first dispatch, or to the refusal without one
    session: I32  # number of its session, counted from 0 as they began; `NEVER`: it has none
    group: I32  # likewise of its group: a main agent's session and all that belongs to it

    def __len__(self) -> int:
        return len(self.arrival_ns)


@dataclass(frozen=True, slots=True)
class Samples:
    """The state of the pool over time, in arrays of shape [samples] or [samples, workers]."""

    time_ns: I64
    busy_share: npt.NDArray[np.float64]  # since the sample before
    running: I32
    waiting: I32
    used_blocks: I32
    query_tokens: I64  # prompt tokens of admitted requests, since the start, per worker
    hit_tokens: I64  # of these, found in the cache


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """The totals of one worker over the whole replay."""

    name: str
    requests: int  # dispatched to it
    busy_ns: int
    steps: int
    evicted_blocks: int
    recomputed_tokens: int  # computed a second time after a preemption
    preemptions: int
    query_tokens: int
    hit_tokens: int  # of these, found on the GPU
    host_hit_tokens: int = 0  # and loaded from host memory


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that many requests share, and the number of workers that held it over time."""

    blocks: int  # its length
    requests: int  # that began with it
    copies: npt.NDArray[np.int32]  # per sample; `NEVER`: not followed then


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of one replay. Lifetime: process."""

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
    split_requests: int = 0  # prefills for another worker, those that were done again included
    stages: tuple[Stage, ...] = ()  # of a ladder of loads, in order of time


_GROW = 4096  # rows added at once
_TYPES = {
    "arrival_ns": "q",
    "dispatched_ns": "q",
    "first_token_ns": "q",
    "finish_ns": "q",
    "prompt_tokens": "i",
    "output_tokens": "i",
    "prompt_blocks": "i",
    "expected_hit_tokens": "i",
    "hit_tokens": "i",
    "worker": "i",
    "attempts": "h",
    "verdict": "b",
    "held_ns": "q",
    "session": "i",
    "group": "i",
}
_ZERO = ("prompt_tokens", "output_tokens", "prompt_blocks", "expected_hit_tokens", "attempts")


class Book:
    """The columns of `RequestTable` while a replay runs, and the error codes of rejected requests.
    Lifetime: replay.

    Rows from `len(book)` on are spare. Values that are not set are 0 for counts, and `NEVER` for
    times, worker, hits, verdict, session and group.
    """

    def __init__(self) -> None:
        self.arrival_ns = array("q")
        self.dispatched_ns = array("q")
        self.first_token_ns = array("q")
        self.finish_ns = array("q")
        self.prompt_tokens = array("i")
        self.output_tokens = array("i")
        self.prompt_blocks = array("i")
        self.expected_hit_tokens = array("i")
        self.hit_tokens = array("i")
        self.worker = array("i")
        self.attempts = array("h")
        self.verdict = array("b")
        self.held_ns = array("q")
        self.session = array("i")
        self.group = array("i")
        self.code = array("b")  # index into `codes`; NEVER: was not turned away
        self.codes: list[str] = []
        self._sessions: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._rows = 0
        self._spare = [
            (getattr(self, name), array(kind, [0 if name in _ZERO else NEVER]) * _GROW)
            for name, kind in {**_TYPES, "code": "b"}.items()
        ]

    def __len__(self) -> int:
        return self._rows

    def add(
        self,
        now_ns: int,
        prompt_tokens: int,
        prompt_blocks: int,
        session: str | None = None,
        group: str | None = None,
    ) -> int:
        """Add a request that arrived, and return its row."""
        row = self._rows
        if row == len(self.verdict):
            for column, rows in self._spare:
                column.extend(rows)
        self._rows = row + 1
        self.arrival_ns[row] = now_ns
        self.prompt_tokens[row] = prompt_tokens
        self.prompt_blocks[row] = prompt_blocks
        if session is not None:
            self.session[row] = self._sessions.setdefault(session, len(self._sessions))
        if group is not None:
            self.group[row] = self._groups.setdefault(group, len(self._groups))
        return row

    @property
    def groups(self) -> int:
        """Return the number of groups that have sent a request so far."""
        return len(self._groups)

    def turned_away(self, row: int, code: str) -> None:
        """Keep the error code with which a request was rejected."""
        if code not in self.codes:
            self.codes.append(code)
        self.code[row] = self.codes.index(code)

    def code_of(self, row: int) -> str:
        """Return the error code with which a request was rejected; "" if it was not."""
        code = self.code[row]
        return "" if code == NEVER else self.codes[code]

    def rejections(self) -> dict[str, int]:
        """Return the number of rejected requests by error code, sorted."""
        counts = np.bincount(self._column("code") + 1, minlength=len(self.codes) + 1)[1:]
        return {code: int(counts[self.codes.index(code)]) for code in sorted(self.codes)}

    def table(self) -> RequestTable:
        """Return a copy of the rows so far."""
        return RequestTable(**{name: self._column(name).copy() for name in _TYPES})

    def _column(self, name: str) -> npt.NDArray[Any]:
        column: array[int] = getattr(self, name)
        return np.frombuffer(column, dtype=column.typecode)[: self._rows]

"""Stores numbers about all workers in numpy columns, with one row for each worker slot.

Code that handles one request or report writes single cells, and a decision reads whole columns. So
the cost of a decision in Python hardly grows with the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import numpy as np

from kvkernels import drain_queues
from policies.contract import Floats, Ints
from policies.facts import WorkerFacts

# A prefill of n tokens after h takes n * (a + q * (h + n / 2)) seconds, so time per token is a line
# over x = h + n / 2 (FLOP count of a causal transformer; Vidur, Agrawal et al., 2024, measures the
# same form). Its slope over its height is fitted by least squares of the relative error, the past
# fading, by two running sums of each kind (recursive least squares with forgetting).
_FADE = 0.995  # of the past at each sample
_PRIOR = 4.0  # samples that believe in no attention at all, far from zero context
_PRIOR_TOKENS = 8_192.0
_PAIR_MAX = 1e-2  # tokens of linear work; a model of 100 dimensions would not reach it
_OUTLIER = 2.0  # a sample counts as at most this many times faster or slower than expected
_SAMPLE_MAX = 100.0  # times longer per token than expected: not a prefill's doing


class PairCost:
    """Learns the cost of attention for each pair of tokens, from the times of prefills.

    One value holds for all workers, because differences between their speeds are removed first.
    Lifetime: process.
    """

    def __init__(self) -> None:
        # Normal equations of 1 = a * u + q * v with u = 1 / y and v = x / y.
        self._uu = self._uv = self._vv = self._u = self._v = 0.0
        for x in (0.0, _PRIOR_TOKENS):
            self._add(1.0, x, _PRIOR / 2)
        self.pair_tokens = 0.0

    def work(self, tokens: float, cached: float) -> float:
        """Return the work to prefill `tokens` tokens after `cached` tokens, including attention.

        The unit of work is one token computed without attention.
        """
        return tokens * (1.0 + self.pair_tokens * (cached + tokens * 0.5))

    def prefill(self, tokens: int, cached: int, linear_tokens: float) -> None:
        """Learn from a prefill that computed `tokens` tokens after `cached` tokens. `linear_tokens`
        is the number of tokens that the worker computes in the same time without attention.
        """
        y = linear_tokens / tokens
        if not 1.0 / _SAMPLE_MAX < y < _SAMPLE_MAX:
            return
        # An unnoticed cache hit makes a prefill look twenty times faster. The error is relative, so
        # it would weigh as much as four hundred other samples.
        x = cached + tokens / 2
        expected = 1.0 + self.pair_tokens * x
        y = min(max(y, expected / _OUTLIER), expected * _OUTLIER)
        for name in ("_uu", "_uv", "_vv", "_u", "_v"):
            setattr(self, name, getattr(self, name) * _FADE)
        self._add(y, x, 1.0)
        det = self._uu * self._vv - self._uv * self._uv
        if det <= 1e-9 * self._uu * self._vv:  # all samples lie at one place
            return
        height = (self._u * self._vv - self._v * self._uv) / det
        slope = (self._v * self._uu - self._u * self._uv) / det
        if height > 0.0:
            self.pair_tokens = min(max(slope / height, 0.0), _PAIR_MAX)

    def _add(self, y: float, x: float, weight: float) -> None:
        u, v = 1.0 / y, x / y
        self._uu += weight * u * u
        self._uv += weight * u * v
        self._vv += weight * v * v
        self._u += weight * u
        self._v += weight * v


class WorkerColumns:
    """Stores numbers about each worker, such as load, speed and capacity, in one row per slot.

    A worker's prefill queue is the difference of two totals: the work ever sent to the worker, and
    the work that it should have done by now. So one vector operation advances all queues.
    Lifetime: process; a row belongs to one worker until the worker leaves.
    """

    def __init__(self, slots: int) -> None:
        def floats(fill: float = 0.0) -> Floats:
            return np.full(slots, fill)

        def ints(fill: int = 0) -> Ints:
            return np.full(slots, fill, dtype=np.int64)

        self.attention = PairCost()  # of the model, so of all workers
        self.worker_id = ints(-1)
        # All prefill work ever sent to the worker, in tokens of linear work, attention included.
        self.charged_work = floats()
        self.drained_work = floats()  # of `charged_work`, estimated or known to be computed
        # The most that may be estimated: up to the end of the oldest prompt without a first token.
        self.drain_limit_work = floats(np.inf)
        # Linear work of one queued token, with its attention, so at least 1: the mean over waiting
        # prompts, because it is unknown which of their tokens are left.
        self.token_work = floats(1.0)
        self.requests = ints()  # own, unfinished
        self.waiting = ints()  # of `requests`, those before their first token
        # Of `waiting`, prompts whose KV memory is not in context_tokens.
        self.waiting_prompt_tokens = ints()
        self.context_tokens = floats()  # KV of own requests past their first token
        # Of `context_tokens`, reserved for prompts that other workers prefill.
        self.decode_place_tokens = floats()
        self.foreign_running = ints()  # reported requests beyond those that this router sent
        self.foreign_waiting = ints()
        self.report_s = floats(-np.inf)
        self.kv_reported_tokens = floats(np.nan)
        self.own_tokens_at_report = floats()  # own prompt and context tokens when it came
        self.kv_capacity_tokens = floats(np.nan)
        self.cached_tokens = floats(np.nan)  # by its KV events
        self.host_cached_tokens = floats()  # by these, in lower tiers
        self.disk_cached_tokens = floats()
        self.host_tokens_per_s = floats(np.nan)  # learned, of loads from there; NaN: not yet
        self.disk_tokens_per_s = floats(np.nan)
        self.prefill_tokens_per_s = floats(1.0)
        self.given_tokens_per_s = floats(1.0)  # the same by its description
        self.speed_samples = ints()  # that the rate was learned from
        self.learned_speed = 1.0  # of the pool, times the rates that were given
        self.step_s = floats(0.01)
        self.max_requests = floats(np.nan)
        self.max_queued_tokens = floats(np.nan)
        self.max_kv_fraction = floats(np.nan)
        self.event_s = floats(-np.inf)
        self.hits_unknown = np.zeros(slots, dtype=np.bool_)
        self.hit_confidence = floats(1.0)  # share of the hits by its events that counts

    def open(self, slot: int, worker_id: int) -> None:
        """Reset all columns in a slot, and assign the slot to the worker `worker_id`; -1 frees the
        slot.
        """
        for name, column in self.named():
            column[slot] = _FRESH.get(name, 0)
        self.worker_id[slot] = worker_id

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and the array of each column."""
        return ((n, column) for n, column in vars(self).items() if isinstance(column, np.ndarray))

    def describe(self, slot: int, facts: WorkerFacts, calibrate: bool) -> None:
        """Write the limits in a worker's description to the worker's row. If `calibrate` is True,
        also forget the learned speeds, and start again from the described speeds.
        """
        self.kv_capacity_tokens[slot] = facts.kv_capacity_tokens
        self.max_requests[slot] = facts.max_requests
        self.max_queued_tokens[slot] = facts.max_queued_tokens
        self.max_kv_fraction[slot] = facts.max_kv_fraction
        if calibrate:
            given = self.given_tokens_per_s[slot] = facts.prefill_tokens_per_s * facts.weight
            self.prefill_tokens_per_s[slot] = given * self.learned_speed
            self.speed_samples[slot] = 0
            self.step_s[slot] = facts.step_s / facts.weight
            self.host_tokens_per_s[slot] = self.disk_tokens_per_s[slot] = np.nan

    def drain(self, elapsed_s: float) -> None:
        """Subtract from each prefill queue the work that its worker should compute in `elapsed_s`
        seconds. `elapsed_s` must be above 0. A queue still contains the oldest prompt whose first
        token has not arrived, because a worker without free KV memory computes nothing for a while,
        and its queue must not seem empty then.
        """
        drain_queues(
            self.drained_work,
            self.prefill_tokens_per_s,
            self.charged_work,
            self.drain_limit_work,
            elapsed_s,
        )

    def queued_tokens(self, slots: slice | Ints) -> Floats:
        """Return the estimated number of prefill tokens that each worker got and has not computed,
        float64[slots].
        """
        queued: Floats = self.charged_work[slots] - self.drained_work[slots]
        return queued if self.attention.pair_tokens == 0.0 else queued / self.token_work[slots]

    def kv_used_tokens(self, slots: slice | Ints) -> Floats:
        """Return the tokens of KV memory in use at each worker, float64[slots]. This is the number
        in the worker's latest load report, plus the tokens of requests that this router has sent
        since the report. NaN means that the worker has reported no number.
        """
        own = self.context_tokens[slots] + self.queued_tokens(slots)
        since_report = np.maximum(own - self.own_tokens_at_report[slots], 0.0)
        return self.kv_reported_tokens[slots] + since_report

    def read_only(self) -> WorkerColumns:
        """Return a copy of this object whose columns are read-only views of the same memory."""
        shown = copy(self)
        for name, column in self.named():
            view = column.view()
            view.flags.writeable = False
            setattr(shown, name, view)
        return shown

    def own_tokens(self, slot: int) -> float:
        """Return the tokens of this router's requests at a worker; both computed and queued tokens
        count.
        """
        return float(self.context_tokens[slot] + self.queued_tokens(slice(slot, slot + 1))[0])


# The values of a fresh row that are not zero.
_FRESH = {
    "drain_limit_work": np.inf,
    "token_work": 1.0,
    "report_s": -np.inf,
    "event_s": -np.inf,
    "kv_reported_tokens": np.nan,
    "kv_capacity_tokens": np.nan,
    "cached_tokens": np.nan,
    "host_tokens_per_s": np.nan,
    "disk_tokens_per_s": np.nan,
    "prefill_tokens_per_s": 1.0,
    "given_tokens_per_s": 1.0,
    "step_s": 0.01,
    "hit_confidence": 1.0,
    "max_requests": np.nan,
    "max_queued_tokens": np.nan,
    "max_kv_fraction": np.nan,
}


class Cells:
    """Gives access to single cells of the columns that each request writes, as Python numbers.

    The cells share the memory of the columns. Reading or writing a single cell takes numpy three
    times as long.
    Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns) -> None:
        self.charged_work = float_cells(columns.charged_work)
        self.drained_work = float_cells(columns.drained_work)
        self.drain_limit_work = float_cells(columns.drain_limit_work)
        self.context_tokens = float_cells(columns.context_tokens)
        self.decode_place_tokens = float_cells(columns.decode_place_tokens)
        self.prefill_tokens_per_s = float_cells(columns.prefill_tokens_per_s)
        self.given_tokens_per_s = float_cells(columns.given_tokens_per_s)
        self.speed_samples = int_cells(columns.speed_samples)
        self.step_s = float_cells(columns.step_s)
        self.token_work = float_cells(columns.token_work)
        self.requests = int_cells(columns.requests)
        self.waiting = int_cells(columns.waiting)
        self.waiting_prompt_tokens = int_cells(columns.waiting_prompt_tokens)
        self.worker_id = int_cells(columns.worker_id)


def float_cells(column: Floats) -> memoryview[float]:
    """Return a view of a float64 column whose cells are Python floats, for fast single access."""
    return column.data.cast("B").cast("d")


def int_cells(column: Ints) -> memoryview[int]:
    """Return a view of an int64 column whose cells are Python ints, for fast single access."""
    return column.data.cast("B").cast("q")

"""Everything a policy may see of the workers, as numpy columns, one row per worker slot.

The ledger, the load reports and the KV views write single cells; a decision reads whole columns.
That keeps the cost of a decision flat in Python whatever the number of workers.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from kvkernels import drain_queues
from policies.contract import Floats, Ints
from policies.facts import WorkerFacts


class WorkerColumns:
    """Lifetime: process; a row's content lives as long as its worker.

    Queued prefill is kept as two running totals, tokens ever charged and tokens presumed
    computed: their difference is the queue, and draining it by the worker's rate is one
    vector operation.
    """

    def __init__(self, slots: int) -> None:
        def floats(fill: float = 0.0) -> Floats:
            return np.full(slots, fill)

        def ints(fill: int = 0) -> Ints:
            return np.full(slots, fill, dtype=np.int64)

        self.worker_id = ints(-1)
        self.charged_tokens = floats()  # uncached prompt tokens ever sent to the worker
        self.drained_tokens = floats()  # of these, presumed or known to be computed
        # What may be presumed at most: up to the end of the oldest prompt without a first token.
        self.drain_limit_tokens = floats(np.inf)
        self.requests = ints()  # own, unfinished
        self.waiting = ints()  # of these, before their first token
        self.context_tokens = floats()  # KV of own requests past their first token
        self.foreign_running = ints()  # reported beyond what this router sent
        self.foreign_waiting = ints()
        self.report_s = floats(-np.inf)
        self.kv_reported_tokens = floats(np.nan)
        self.own_tokens_at_report = floats()  # own prompt and context tokens when it came
        self.kv_capacity_tokens = floats(np.nan)
        self.prefill_tokens_per_s = floats(1.0)
        self.step_s = floats(0.01)
        self.max_requests = floats(np.nan)
        self.max_queued_tokens = floats(np.nan)
        self.max_kv_fraction = floats(np.nan)
        self.event_s = floats(-np.inf)
        self.hits_unknown = np.zeros(slots, dtype=np.bool_)

    def open(self, slot: int, worker_id: int) -> None:
        """Start a row afresh for a worker that joins."""
        for name, column in vars(self).items():
            column[slot] = _FRESH.get(name, 0)
        self.worker_id[slot] = worker_id

    def describe(self, slot: int, facts: WorkerFacts, calibrate: bool) -> None:
        """Write what was learned of the worker; `calibrate` resets its speeds too."""
        self.kv_capacity_tokens[slot] = facts.kv_capacity_tokens
        self.max_requests[slot] = facts.max_requests
        self.max_queued_tokens[slot] = facts.max_queued_tokens
        self.max_kv_fraction[slot] = facts.max_kv_fraction
        if calibrate:
            self.prefill_tokens_per_s[slot] = facts.prefill_tokens_per_s * facts.weight
            self.step_s[slot] = facts.step_s / facts.weight

    def drain(self, elapsed_s: float) -> None:
        """Take off every queue what its worker should have computed in so long (above 0).

        Never more than the oldest prompt that still waits for its first token: a worker that is
        out of KV computes nothing, however long that takes, and its queue must not look empty.
        """
        drain_queues(
            self.drained_tokens,
            self.prefill_tokens_per_s,
            self.charged_tokens,
            self.drain_limit_tokens,
            elapsed_s,
        )

    def read_only(self) -> WorkerColumns:
        """The same columns, where they lie, for those who may not write."""
        shown = copy(self)
        for name, column in vars(self).items():
            view = column.view()
            view.flags.writeable = False
            setattr(shown, name, view)
        return shown

    def own_tokens(self, slot: int) -> float:
        """Tokens of own requests on a worker, computed or still queued."""
        queued = self.charged_tokens[slot] - self.drained_tokens[slot]
        return float(self.context_tokens[slot] + queued)


# What a fresh row holds where it is not zero.
_FRESH = {
    "drain_limit_tokens": np.inf,
    "report_s": -np.inf,
    "event_s": -np.inf,
    "kv_reported_tokens": np.nan,
    "kv_capacity_tokens": np.nan,
    "prefill_tokens_per_s": 1.0,
    "step_s": 0.01,
    "max_requests": np.nan,
    "max_queued_tokens": np.nan,
    "max_kv_fraction": np.nan,
}


class Cells:
    """Single cells of the columns that every request writes, as plain Python numbers.

    The same memory: a column is for reading many rows at once, and numpy takes three times as
    long to read or write one. Lifetime: process.
    """

    __slots__ = (
        "charged_tokens",
        "context_tokens",
        "drain_limit_tokens",
        "drained_tokens",
        "prefill_tokens_per_s",
        "requests",
        "step_s",
        "waiting",
    )

    def __init__(self, columns: WorkerColumns) -> None:
        self.charged_tokens = _float_cells(columns.charged_tokens)
        self.drained_tokens = _float_cells(columns.drained_tokens)
        self.drain_limit_tokens = _float_cells(columns.drain_limit_tokens)
        self.context_tokens = _float_cells(columns.context_tokens)
        self.prefill_tokens_per_s = _float_cells(columns.prefill_tokens_per_s)
        self.step_s = _float_cells(columns.step_s)
        self.requests = _int_cells(columns.requests)
        self.waiting = _int_cells(columns.waiting)


def _float_cells(column: Floats) -> memoryview[float]:
    return column.data.cast("B").cast("d")


def _int_cells(column: Ints) -> memoryview[int]:
    return column.data.cast("B").cast("q")

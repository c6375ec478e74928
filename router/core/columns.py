"""Everything a policy may see of the workers, as numpy columns, one row per worker slot.

The ledger, the load reports and the KV views write single cells; a decision reads whole columns.
That keeps the cost of a decision flat in Python whatever the number of workers.
"""

from __future__ import annotations

import numpy as np

from policies.contract import FleetView, Ints
from policies.facts import WorkerFacts


class WorkerColumns:
    """Lifetime: process; a row's content lives as long as its worker.

    Queued prefill is kept as two running totals, tokens ever charged and tokens presumed
    computed: their difference is the queue, and draining it by the worker's rate is one
    vector operation.
    """

    def __init__(self, slots: int) -> None:
        def floats(fill: float = 0.0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.full(slots, fill)

        def ints(fill: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.full(slots, fill, dtype=np.int64)

        self.worker_id = ints(-1)
        self.charged_tokens = floats()  # uncached prompt tokens ever sent to the worker
        self.drained_tokens = floats()  # of these, presumed or known to be computed
        self.drained_s = floats()  # when `drained_tokens` was last brought up to date
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

    def open(self, slot: int, worker_id: int, now_s: float) -> None:
        """Start a row afresh for a worker that joins."""
        for name, column in vars(self).items():
            column[slot] = _FRESH.get(name, 0)
        self.worker_id[slot] = worker_id
        self.drained_s[slot] = now_s

    def describe(self, slot: int, facts: WorkerFacts, calibrate: bool) -> None:
        """Write what was learned of the worker; `calibrate` resets its speeds too."""
        self.kv_capacity_tokens[slot] = facts.kv_capacity_tokens
        self.max_requests[slot] = facts.max_requests
        self.max_queued_tokens[slot] = facts.max_queued_tokens
        self.max_kv_fraction[slot] = facts.max_kv_fraction
        if calibrate:
            self.prefill_tokens_per_s[slot] = facts.prefill_tokens_per_s * facts.weight
            self.step_s[slot] = facts.step_s / facts.weight

    def drain(self, now_s: float) -> None:
        """Take off every queue what its worker should have computed since last time."""
        elapsed_s = np.maximum(now_s - self.drained_s, 0.0)
        np.minimum(
            self.drained_tokens + elapsed_s * self.prefill_tokens_per_s,
            self.charged_tokens,
            out=self.drained_tokens,
        )
        np.maximum(self.drained_s, now_s, out=self.drained_s)  # time never counts twice

    def own_tokens(self, slot: int) -> float:
        """Tokens of own requests on a worker, computed or still queued."""
        queued = self.charged_tokens[slot] - self.drained_tokens[slot]
        return float(self.context_tokens[slot] + queued)

    def view(
        self,
        rows: Ints,
        hit_tokens: Ints,
        now_s: float,
        stale_s: float,
        arrival_rate_per_s: float,
        live_sessions: int,
    ) -> FleetView:
        """The rows `rows` as a policy sees them. `drain(now_s)` has been called before."""
        fresh = now_s - self.report_s[rows] <= stale_s
        queued = self.charged_tokens[rows] - self.drained_tokens[rows]
        waiting = self.waiting[rows]
        running = self.requests[rows] - waiting
        own = self.context_tokens[rows] + queued
        since_report = np.maximum(own - self.own_tokens_at_report[rows], 0.0)
        speed = self.prefill_tokens_per_s[rows]
        none = np.zeros(len(rows), dtype=np.int64)
        return FleetView(
            worker_id=self.worker_id[rows],
            hit_tokens=hit_tokens,
            hit_tokens_host=none,
            hit_tokens_disk=none,
            hits_unknown=self.hits_unknown[rows],
            queued_prefill_tokens=queued,
            running=running + np.where(fresh, self.foreign_running[rows], 0),
            waiting=waiting + np.where(fresh, self.foreign_waiting[rows], 0),
            context_tokens=self.context_tokens[rows],
            kv_used_tokens=self.kv_reported_tokens[rows] + since_report,
            kv_capacity_tokens=self.kv_capacity_tokens[rows],
            prefill_tokens_per_s=speed,
            step_s=self.step_s[rows],
            working_set_tokens=np.full(len(rows), np.nan),
            max_requests=self.max_requests[rows],
            max_queued_tokens=self.max_queued_tokens[rows],
            max_kv_fraction=self.max_kv_fraction[rows],
            load_age_s=now_s - self.report_s[rows],
            event_age_s=now_s - self.event_s[rows],
            arrival_rate_per_s=arrival_rate_per_s,
            mean_load_s=float(np.mean(queued / speed)) if len(rows) else 0.0,
            live_sessions=live_sessions,
        )


# What a fresh row holds where it is not zero.
_FRESH = {
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

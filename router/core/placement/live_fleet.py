"""Shows the workers to a policy in one decision, backed by the decision core's columns. A column is
made when it is read, because most policies read few of the two dozen columns, and read most of
these only once. Most columns are read-only views of the core's arrays. Only the result of a look-up
or a sum is remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from kvkernels import load_tokens, median_product, missing_tokens
from policies.contract import Bools, FleetView, Floats, Ints
from router.core.placement.eligible import Rows
from router.core.placement.session_tracking import SessionView
from router.core.sessions.arrivals import ArrivalEstimator
from router.core.workers.columns import WorkerColumns


class LiveFleet(FleetView):
    """The workers that a policy may choose in one decision, read from the decision core's columns.

    Policies read the properties. Native code computes a policy's costs from `columns`, `rows` and
    `sessions`. Lifetime: one decision.
    """

    def __init__(
        self,
        columns: WorkerColumns,
        rows: Rows,
        hit_tokens: Ints,
        now_s: float,
        others_s: float,
        stale_s: float,
        arrivals: ArrivalEstimator,
        below_gpu: Callable[[], tuple[Ints, Ints]] | None = None,
        sessions: SessionView | None = None,
    ) -> None:
        """Build the fleet of the workers in `rows`, from their `columns`. `others_s` is the time of
        the latest report about other clients' load, and `stale_s` the seconds for which such a
        report counts. `below_gpu` returns the hit tokens in host memory and on disk; it is None if
        no worker has such tiers. `sessions` is the session data of the decision, or None while
        sessions are not tracked.
        """
        hit_tokens.setflags(write=False)  # the ledger charges by them, so no policy may change them
        self.columns = columns
        self.rows = rows
        self.sessions = sessions
        self._hit_tokens = hit_tokens
        self._now_s = now_s
        self._others_s = others_s
        self._stale_s = stale_s
        self._arrivals = arrivals
        self._below_gpu = below_gpu

    def __len__(self) -> int:
        return len(self._hit_tokens)

    @property
    def has_lower_tiers(self) -> bool:
        """True if workers may hold KV in host memory or on disk."""
        return self._below_gpu is not None

    @property
    def foreign_load_max_age_s(self) -> float:
        """The age in seconds up to which a report about other clients' load counts; -inf if no
        report counts.
        """
        return -math.inf if self._fresh is None else self._stale_s

    @property
    def hit_tokens(self) -> Ints:
        return self._hit_tokens

    @property
    def worker_id(self) -> Ints:
        return self.columns.worker_id[self.rows.slots]

    @property
    def hits_unknown(self) -> Bools:
        return self.columns.hits_unknown[self.rows.slots]

    @property
    def hit_confidence(self) -> Floats:
        return self.columns.hit_confidence[self.rows.slots]

    @property
    def token_work(self) -> Floats:
        return self.columns.token_work[self.rows.slots]

    @property
    def context_tokens(self) -> Floats:
        return self.columns.context_tokens[self.rows.slots]

    @property
    def waiting_prompt_tokens(self) -> Ints:
        return self.columns.waiting_prompt_tokens[self.rows.slots]

    @property
    def kv_capacity_tokens(self) -> Floats:
        return self.columns.kv_capacity_tokens[self.rows.slots]

    @property
    def cached_tokens(self) -> Floats:
        return self.columns.cached_tokens[self.rows.slots]

    @property
    def host_cached_tokens(self) -> Floats:
        return self.columns.host_cached_tokens[self.rows.slots]

    @property
    def disk_cached_tokens(self) -> Floats:
        return self.columns.disk_cached_tokens[self.rows.slots]

    @property
    def host_tokens_per_s(self) -> Floats:
        return self.columns.host_tokens_per_s[self.rows.slots]

    @property
    def disk_tokens_per_s(self) -> Floats:
        return self.columns.disk_tokens_per_s[self.rows.slots]

    @property
    def spared_tokens(self) -> Ints:
        return self._hit_tokens if self._below_gpu is None else self._spared_tokens

    @cached_property
    def _spared_tokens(self) -> Ints:
        return super().spared_tokens

    def kept_tokens(self, prompt_tokens: int) -> Floats:
        if self._below_gpu is None:
            return self.assumed_capacity_tokens
        return super().kept_tokens(prompt_tokens)

    @property
    def prefill_tokens_per_s(self) -> Floats:
        return self.columns.prefill_tokens_per_s[self.rows.slots]

    @property
    def step_s(self) -> Floats:
        return self.columns.step_s[self.rows.slots]

    @property
    def max_requests(self) -> Floats:
        return self.columns.max_requests[self.rows.slots]

    @property
    def max_queued_tokens(self) -> Floats:
        return self.columns.max_queued_tokens[self.rows.slots]

    @property
    def max_kv_fraction(self) -> Floats:
        return self.columns.max_kv_fraction[self.rows.slots]

    @cached_property
    def _lower_hits(self) -> tuple[Ints, Ints]:
        if self._below_gpu is not None:
            return self._below_gpu()
        nothing = np.zeros(len(self), dtype=np.int64)
        return nothing, nothing

    @property
    def hit_tokens_host(self) -> Ints:
        return self._lower_hits[0]

    @property
    def hit_tokens_disk(self) -> Ints:
        return self._lower_hits[1]

    @property
    def queued_prefill_tokens(self) -> Floats:
        return self.columns.queued_tokens(self.rows.slots)

    @property
    def queued_prefill_s(self) -> Floats:
        columns, slots = self.columns, self.rows.slots
        queued = columns.charged_work[slots] - columns.drained_work[slots]
        return queued / columns.prefill_tokens_per_s[slots]

    @property
    def _fresh(self) -> Bools | None:
        """True for each worker whose report about other clients' load is recent enough, bool[rows].
        The value is None if no worker has such a report.
        """
        if self._now_s - self._others_s > self._stale_s:
            return None
        return self.load_age_s <= self._stale_s

    @property
    def running(self) -> Ints:
        columns, slots, fresh = self.columns, self.rows.slots, self._fresh
        own = columns.requests[slots] - columns.waiting[slots]
        return own if fresh is None else own + columns.foreign_running[slots] * fresh

    @property
    def waiting(self) -> Ints:
        columns, slots, fresh = self.columns, self.rows.slots, self._fresh
        own = columns.waiting[slots]
        return own if fresh is None else own + columns.foreign_waiting[slots] * fresh

    @property
    def requests(self) -> Ints:
        columns, slots, fresh = self.columns, self.rows.slots, self._fresh
        own = columns.requests[slots]
        if fresh is None:
            return own
        return own + (columns.foreign_running[slots] + columns.foreign_waiting[slots]) * fresh

    @property
    def kv_used_tokens(self) -> Floats:
        return self.columns.kv_used_tokens(self.rows.slots)

    @cached_property
    def working_set_tokens(self) -> Floats:
        sessions = self.sessions
        return np.zeros(len(self)) if sessions is None else sessions.working_set_tokens()

    @cached_property
    def working_set_s(self) -> Floats:
        sessions = self.sessions
        return np.zeros(len(self)) if sessions is None else sessions.working_set_s()

    @cached_property
    def _trunk(self) -> tuple[int, int]:
        return (0, 0) if self.sessions is None else self.sessions.trunk()

    @property
    def hot_trunk_tokens(self) -> int:
        return self._trunk[0]

    @property
    def copies_missing(self) -> int:
        return self._trunk[1]

    @cached_property
    def holds_trunk(self) -> Bools:
        sessions = self.sessions
        return np.zeros(len(self), dtype=np.bool_) if sessions is None else sessions.holds_trunk()

    @property
    def step_tokens(self) -> float:
        columns = self.columns
        return median_product(columns.step_s, columns.prefill_tokens_per_s, self.rows.slot_ids)

    def load_tokens(self, step_tokens: float) -> Floats:
        columns = self.columns
        if self._fresh is not None:  # the load of other clients is added
            return super().load_tokens(step_tokens)
        return load_tokens(
            columns.charged_work,
            columns.drained_work,
            None if columns.attention.pair_tokens == 0.0 else columns.token_work,
            columns.requests,
            self.rows.slot_ids,
            step_tokens,
        )

    def missing_tokens(self, prompt_tokens: int) -> Floats:
        return missing_tokens(self.spared_tokens, prompt_tokens)

    @property
    def has_thresholds(self) -> bool:
        return self.rows.have_thresholds

    @property
    def has_kv_thresholds(self) -> bool:
        return self.rows.have_kv_thresholds

    @property
    def load_age_s(self) -> Floats:
        return self._now_s - self.columns.report_s[self.rows.slots]

    @property
    def event_age_s(self) -> Floats:
        return self._now_s - self.columns.event_s[self.rows.slots]

    @property
    def arrival_rate_per_s(self) -> float:
        return self._arrivals.rate_per_s(self._now_s)

    @property
    def turnover_per_s(self) -> float:
        unfinished = int(np.add.reduce(self.columns.requests))  # of all pools, as are arrivals
        return self.arrival_rate_per_s / max(unfinished, 1)

    @cached_property
    def mean_load_s(self) -> float:
        if not len(self):
            return 0.0
        return math.fsum(self.queued_prefill_s.tolist()) / len(self)

    @property
    def live_sessions(self) -> int:
        return self._arrivals.live_sessions(self._now_s)

    @property
    def pair_tokens(self) -> float:
        return self.columns.attention.pair_tokens

    @cached_property
    def cycle_s(self) -> float:
        return 0.0 if self.sessions is None else self.sessions.cycle_s()

"""The fleet as one decision shows it to the policy, or to native code in the default one's place.

A column is made when it is read. Most policies read a few of the two dozen columns, most of them
once, and most columns are what the ledger keeps anyway: those are shown where they lie, read-only.
So a column is made anew at each reading; only what takes a look-up or a sum is remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from kvkernels import WarmsetCosts, load_tokens, median_product, missing_tokens
from policies.contract import Bools, FleetView, Floats, Ints, RequestView
from policies.load import LoadedPolicy
from policies.warmset import Warmset
from router.core.placement.eligible import Rows
from router.core.placement.session_tracking import SessionView
from router.core.sessions.arrivals import ArrivalEstimator
from router.core.sessions.sessions import Sessions
from router.core.workers.columns import WorkerColumns


class LiveFleet(FleetView):
    """A `FleetView` of the columns as they are now. Lifetime: one decision."""

    _columns: WorkerColumns  # read-only
    _rows: Rows
    _now_s: float
    _others_s: float
    _stale_s: float
    _arrivals: ArrivalEstimator
    _below_gpu: Callable[[], tuple[Ints, Ints]] | None
    _sessions: SessionView | None

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
        """`others_s`: when a worker last reported others' load, believed for `stale_s`.
        `below_gpu` gives the hit tokens of host and disk; None: nobody holds anything there.
        `sessions`: None where they are not followed.
        """
        own = self.__dict__  # a view is frozen for everybody else
        hit_tokens.setflags(write=False)  # the ledger charges by them, whatever a policy does
        own["_columns"] = columns
        own["_rows"] = rows
        object.__setattr__(self, "hit_tokens", hit_tokens)
        own["_now_s"] = now_s
        own["_others_s"] = others_s
        own["_stale_s"] = stale_s
        own["_arrivals"] = arrivals
        own["_below_gpu"] = below_gpu
        own["_sessions"] = sessions

    def __len__(self) -> int:
        return len(self.hit_tokens)

    @property
    def worker_id(self) -> Ints:
        return self._columns.worker_id[self._rows.slots]

    @property
    def hits_unknown(self) -> Bools:
        return self._columns.hits_unknown[self._rows.slots]

    @property
    def hit_confidence(self) -> Floats:
        return self._columns.hit_confidence[self._rows.slots]

    @property
    def token_work(self) -> Floats:
        return self._columns.token_work[self._rows.slots]

    @property
    def context_tokens(self) -> Floats:
        return self._columns.context_tokens[self._rows.slots]

    @property
    def kv_capacity_tokens(self) -> Floats:
        return self._columns.kv_capacity_tokens[self._rows.slots]

    @property
    def cached_tokens(self) -> Floats:
        return self._columns.cached_tokens[self._rows.slots]

    @property
    def host_cached_tokens(self) -> Floats:
        return self._columns.host_cached_tokens[self._rows.slots]

    @property
    def disk_cached_tokens(self) -> Floats:
        return self._columns.disk_cached_tokens[self._rows.slots]

    @property
    def host_tokens_per_s(self) -> Floats:
        return self._columns.host_tokens_per_s[self._rows.slots]

    @property
    def disk_tokens_per_s(self) -> Floats:
        return self._columns.disk_tokens_per_s[self._rows.slots]

    @cached_property
    def spared_tokens(self) -> Ints:
        return self.hit_tokens if self._below_gpu is None else super().spared_tokens

    def kept_tokens(self, prompt_tokens: int) -> Floats:
        if self._below_gpu is None:
            return self.assumed_capacity_tokens
        return super().kept_tokens(prompt_tokens)

    @property
    def prefill_tokens_per_s(self) -> Floats:
        return self._columns.prefill_tokens_per_s[self._rows.slots]

    @property
    def step_s(self) -> Floats:
        return self._columns.step_s[self._rows.slots]

    @property
    def max_requests(self) -> Floats:
        return self._columns.max_requests[self._rows.slots]

    @property
    def max_queued_tokens(self) -> Floats:
        return self._columns.max_queued_tokens[self._rows.slots]

    @property
    def max_kv_fraction(self) -> Floats:
        return self._columns.max_kv_fraction[self._rows.slots]

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
        return self._columns.queued_tokens(self._rows.slots)

    @property
    def queued_prefill_s(self) -> Floats:
        columns, slots = self._columns, self._rows.slots
        queued = columns.charged_work[slots] - columns.drained_work[slots]
        return queued / columns.prefill_tokens_per_s[slots]

    @property
    def _fresh(self) -> Bools | None:
        """bool[rows]: others' load is as reported lately, and believed; None: there is none."""
        if self._now_s - self._others_s > self._stale_s:
            return None
        return self.load_age_s <= self._stale_s

    @property
    def running(self) -> Ints:
        columns, slots, fresh = self._columns, self._rows.slots, self._fresh
        own = columns.requests[slots] - columns.waiting[slots]
        return own if fresh is None else own + columns.foreign_running[slots] * fresh

    @property
    def waiting(self) -> Ints:
        columns, slots, fresh = self._columns, self._rows.slots, self._fresh
        own = columns.waiting[slots]
        return own if fresh is None else own + columns.foreign_waiting[slots] * fresh

    @property
    def requests(self) -> Ints:
        columns, slots, fresh = self._columns, self._rows.slots, self._fresh
        own = columns.requests[slots]
        if fresh is None:
            return own
        return own + (columns.foreign_running[slots] + columns.foreign_waiting[slots]) * fresh

    @property
    def kv_used_tokens(self) -> Floats:
        return self._columns.kv_used_tokens(self._rows.slots)

    @cached_property
    def working_set_tokens(self) -> Floats:
        sessions = self._sessions
        return np.zeros(len(self)) if sessions is None else sessions.working_set_tokens()

    @cached_property
    def working_set_s(self) -> Floats:
        sessions = self._sessions
        return np.zeros(len(self)) if sessions is None else sessions.working_set_s()

    @cached_property
    def _trunk(self) -> tuple[int, int]:
        return (0, 0) if self._sessions is None else self._sessions.trunk()

    @property
    def hot_trunk_tokens(self) -> int:
        return self._trunk[0]

    @property
    def copies_missing(self) -> int:
        return self._trunk[1]

    @cached_property
    def holds_trunk(self) -> Bools:
        sessions = self._sessions
        return np.zeros(len(self), dtype=np.bool_) if sessions is None else sessions.holds_trunk()

    @property
    def step_tokens(self) -> float:
        columns = self._columns
        return median_product(columns.step_s, columns.prefill_tokens_per_s, self._rows.slot_ids)

    def load_tokens(self, step_tokens: float) -> Floats:
        columns = self._columns
        if self._fresh is not None:  # others' requests come on top
            return super().load_tokens(step_tokens)
        return load_tokens(
            columns.charged_work,
            columns.drained_work,
            None if columns.attention.pair_tokens == 0.0 else columns.token_work,
            columns.requests,
            self._rows.slot_ids,
            step_tokens,
        )

    def missing_tokens(self, prompt_tokens: int) -> Floats:
        return missing_tokens(self.spared_tokens, prompt_tokens)

    @property
    def has_thresholds(self) -> bool:
        return self._rows.have_thresholds

    @property
    def has_kv_thresholds(self) -> bool:
        return self._rows.have_kv_thresholds

    @property
    def load_age_s(self) -> Floats:
        return self._now_s - self._columns.report_s[self._rows.slots]

    @property
    def event_age_s(self) -> Floats:
        return self._now_s - self._columns.event_s[self._rows.slots]

    @property
    def arrival_rate_per_s(self) -> float:
        return self._arrivals.rate_per_s(self._now_s)

    @property
    def turnover_per_s(self) -> float:
        unfinished = int(np.add.reduce(self._columns.requests))  # of all pools, as are arrivals
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
        return self._columns.attention.pair_tokens

    @cached_property
    def cycle_s(self) -> float:
        return 0.0 if self._sessions is None else self._sessions.cycle_s()


_STANDINGS = {"new": 0, "cold": 1, "warm": 2}


class NativeWarmset:
    """Gives what `policy` gives, to the last bit. Lifetime: while it is the one in use."""

    def __init__(self, policy: Warmset) -> None:
        self._policy = policy
        self._costs: WarmsetCosts | None = None
        self._of: Sessions | None = None  # whose arrays these were made over

    def costs(self, request: RequestView, fleet: FleetView) -> Floats | None:
        """float64[rows], seconds; None: ask the policy, for sessions are not followed or workers
        have lower tiers.
        """
        if type(fleet) is not LiveFleet:
            return None
        sessions = fleet._sessions
        if sessions is None or fleet._below_gpu is not None:
            return None
        if self._costs is None or self._of is not sessions.sessions:
            self._costs = self._over(fleet._columns, sessions)
        own_slot, own_tokens, own_work, holds_trunk, own_trunk_alone = sessions.own()
        return self._costs.costs(
            fleet._rows.slot_ids,
            fleet.hit_tokens,
            request.prompt_tokens,
            request.trunk_tokens,
            _STANDINGS[request.standing],
            request.home_id,
            request.return_chance,
            request.held_s if request.may_wait_s > 0.0 else math.inf,
            own_slot,
            own_tokens,
            own_work,
            holds_trunk,
            own_trunk_alone,
            *sessions.hot_trunk(),
            fleet.turnover_per_s,
            sessions.cycle_s(),
            fleet.pair_tokens,
            request.now_s,
            # How old a report of others' load may be to count.
            -math.inf if fleet._fresh is None else fleet._stale_s,
        )

    def _over(self, columns: WorkerColumns, sessions: SessionView) -> WarmsetCosts:
        policy, self._of = self._policy, sessions.sessions
        shown = dict(columns.named()) | sessions.columns()
        return WarmsetCosts(shown, policy.gate, policy.stay, policy.running)


def native_costs(policy: LoadedPolicy) -> NativeWarmset | None:
    """For a policy that native code knows, and that nothing is wrapped round; else None."""
    inside = policy.policy
    return NativeWarmset(inside) if type(inside) is Warmset and not policy.wrappers else None

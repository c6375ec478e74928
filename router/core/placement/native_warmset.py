"""Computes the costs of the default policy, `policies.warmset`, in native code.

The native code reads the decision core's columns. Its formula is in
`kernels/src/decision/warmset.cpp`.
"""

from __future__ import annotations

import math

from kvkernels import WarmsetCosts
from policies.contract import FleetView, Floats, RequestView
from policies.load import LoadedPolicy
from policies.warmset import Warmset
from router.core.placement.live_fleet import LiveFleet
from router.core.placement.session_tracking import SessionView
from router.core.sessions.sessions import Sessions
from router.core.workers.columns import WorkerColumns

_STANDINGS = {"new": 0, "cold": 1, "warm": 2}


class NativeWarmset:
    """Computes the costs of a `Warmset` policy in native code, equal to Python's to the last bit.

    Lifetime: as long as the router uses this policy.
    """

    def __init__(self, policy: Warmset) -> None:
        self._policy = policy
        self._costs: WarmsetCosts | None = None
        self._of: Sessions | None = None  # the sessions whose arrays `_costs` reads

    def costs(self, request: RequestView, fleet: FleetView) -> Floats | None:
        """Return the costs in seconds, float64[rows], or None if Python must compute them. Python
        must compute the costs if sessions are not tracked, if workers have tiers below the GPU, or
        if `fleet` is not a `LiveFleet`.
        """
        if type(fleet) is not LiveFleet:
            return None
        sessions = fleet.sessions
        if sessions is None or fleet.has_lower_tiers:
            return None
        if self._costs is None or self._of is not sessions.sessions:
            self._costs = self._over(fleet.columns, sessions)
        own_slot, own_tokens, own_work, holds_trunk, own_trunk_alone = sessions.own()
        return self._costs.costs(
            fleet.rows.slot_ids,
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
            fleet.foreign_load_max_age_s,
        )

    def _over(self, columns: WorkerColumns, sessions: SessionView) -> WarmsetCosts:
        policy, self._of = self._policy, sessions.sessions
        shown = dict(columns.named()) | sessions.columns()
        return WarmsetCosts(shown, policy.gate, policy.stay, policy.running)


def native_costs(policy: LoadedPolicy) -> NativeWarmset | None:
    """Return the native code that computes the costs of `policy`, or None if there is none. Only
    the policy `warmset` without wrappers has native code.
    """
    inside = policy.policy
    return NativeWarmset(inside) if type(inside) is Warmset and not policy.wrappers else None

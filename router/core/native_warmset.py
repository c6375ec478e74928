"""The default policy's costs by one native call; `policies.warmset` says what they are."""

from __future__ import annotations

from kvkernels import WarmsetCosts
from policies.contract import FleetView, Floats, RequestView
from policies.load import LoadedPolicy
from policies.warmset import Warmset
from router.core.columns import WorkerColumns
from router.core.live_fleet import LiveFleet
from router.core.session_tracking import SessionView

_STANDINGS = {"new": 0, "cold": 1, "warm": 2}


class NativeWarmset:
    """Gives what `policy` gives, to the last bit. Lifetime: while it is the one in use."""

    def __init__(self, policy: Warmset) -> None:
        self._policy = policy
        self._costs: WarmsetCosts | None = None
        self._of: list[Floats] = []  # arrays of the sessions that these were made over

    def costs(self, request: RequestView, fleet: FleetView) -> Floats | None:
        """float64[rows], seconds; None: ask the policy, for sessions are not followed or workers
        have lower tiers.
        """
        view = fleet.native_view() if type(fleet) is LiveFleet else None
        if view is None:
            return None
        columns, slots, sessions, believed_s = view
        if self._costs is None or not sessions.has(self._of):
            self._costs = self._over(columns, sessions)
        own_slot, own_tokens, own_work, holds_trunk, own_trunk_alone = sessions.own()
        return self._costs.costs(
            slots,
            fleet.hit_tokens,
            request.prompt_tokens,
            request.trunk_tokens,
            _STANDINGS[request.standing],
            request.home_id,
            request.return_chance,
            request.held_s,
            own_slot,
            own_tokens,
            own_work,
            holds_trunk,
            own_trunk_alone,
            fleet.hot_trunk_tokens,
            fleet.copies_missing,
            fleet.turnover_per_s,
            fleet.cycle_s,
            fleet.pair_tokens,
            request.now_s,
            believed_s,
        )

    def _over(self, columns: WorkerColumns, sessions: SessionView) -> WarmsetCosts:
        policy, own = self._policy, sessions.columns()
        self._of = list(own.values())
        return WarmsetCosts(dict(columns.named()) | own, policy.gate, policy.stay, policy.running)


def native_costs(policy: LoadedPolicy) -> NativeWarmset | None:
    """For a policy that native code knows, and that nothing is wrapped round; else None."""
    inside = policy.policy
    return NativeWarmset(inside) if type(inside) is Warmset and not policy.wrappers else None

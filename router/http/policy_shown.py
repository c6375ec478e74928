"""The policy in use as the admin port shows it."""

from __future__ import annotations

from typing import Any

from router.core.guard import PolicyGuard


def policy_shown(guard: PolicyGuard, now_s: float) -> dict[str, Any]:
    """Its specification, who decides instead of it while it is suspended, and its faults by kind.

    `suspended_for_s` is null where it is not suspended, and 0 where it is tried again with the
    next request.
    """
    suspension = guard.suspension
    deciding = guard.fallback if suspension.active else guard.policy
    left_s = max(suspension.until_s - now_s, 0.0) if suspension.active else None
    name = guard.policy.name
    return {
        "policy": guard.policy.spec,
        "fallback": guard.fallback.spec,
        "deciding": deciding.spec,
        "suspended_for_s": left_s,
        "faults": {kind: count for (of, kind), count in guard.faults.items() if of == name},
        "last_fault": None if guard.last_fault is None else str(guard.last_fault),
    }

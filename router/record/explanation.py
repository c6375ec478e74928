"""Decisions and holds as JSON, for headers, the admin port and the request log.

Numbers have six significant digits; null stands for what nobody knows and for infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from router.core.actions import Decision
from router.core.chooser import Withheld
from router.core.details import Details, Seen

_IN_A_HEADER = 3  # workers


def explanation(request_id: int, worker_id: int, decision: Decision) -> dict[str, Any]:
    """A decision in short: the best three, the chosen one first; with their terms, if asked for."""
    seen = {} if decision.details is None else {one.worker_id: one for one in decision.details.seen}
    return {
        "request": request_id,
        "worker": worker_id,
        "policy": decision.policy,
        "reason": decision.reason,
        "expected_hit_tokens": decision.hit_tokens,
        "prompt_tokens": decision.prompt_tokens,
        "approximate": decision.approximate,
        "held_s": None if decision.details is None else _plain(decision.details.request["held_s"]),
        "standing": None if decision.details is None else decision.details.request["standing"],
        "unit": decision.unit,
        "best": [
            {"worker": c.worker_id, "cost": _plain(c.cost), "hit_tokens": c.hit_tokens}
            | ({"terms": _numbers(seen[c.worker_id].terms)} if c.worker_id in seen else {})
            for c in decision.candidates
        ],
    }


def everything(details: Details) -> dict[str, Any]:
    """All that a decision saw: the request, the pool, the best eight workers."""
    return {
        "of_request": _numbers(details.request),
        "of_pool": _numbers(details.pool),
        "considered_workers": details.workers,
        "workers": [_worker(seen) for seen in details.seen],
    }


def columns_in_header(details: Details) -> dict[str, Any]:
    """As much of it as a header may hold: of the best three workers, what is known."""
    known = {
        str(seen.worker_id): {
            name: value for name, value in _numbers(seen.columns).items() if value is not None
        }
        for seen in details.seen[:_IN_A_HEADER]
    }
    return {"columns": known}


def _worker(seen: Seen) -> dict[str, Any]:
    return {
        "worker": seen.worker_id,
        "cost": _plain(seen.cost),
        "terms": _numbers(seen.terms),
        "columns": _numbers(seen.columns),
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def withheld(request_id: int, hold: Withheld) -> dict[str, Any]:
    """A hold in short: how long, of what standing, and what the best three would cost."""
    seen = hold.details.seen[:_IN_A_HEADER]
    return {
        "request": request_id,
        "held": True,
        "held_s": _plain(hold.details.request["held_s"]),
        "standing": hold.details.request["standing"],
        "policy": hold.policy,
        "prompt_tokens": hold.details.request["prompt_tokens"],
        "best": [{"worker": one.worker_id, "terms": _numbers(one.terms)} for one in seen],
    }

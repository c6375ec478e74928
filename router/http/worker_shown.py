"""A worker as the admin port shows it."""

from __future__ import annotations

import math
from typing import Any

from router.events.elected import ElectedFeed
from router.fleet_io.member import Member
from router.switchboard import Switchboard


def worker_shown(switchboard: Switchboard, member: Member) -> dict[str, Any]:
    """What is known of it; of one that was not recognized yet, little."""
    core, spec = switchboard.core, member.spec
    worker = core.workers.get(member.worker_id)
    now_s = switchboard.clock()
    shown: dict[str, Any] = {
        "id": member.worker_id,
        "url": spec.url,
        "rank": spec.rank,
        "state": "joining" if worker is None else worker.shown_state,
        "leaving": member.leaving,
        "leaving_s": None if member.leave is None else _number(now_s - member.leave.since_s),
        "named_by": member.named.by,
        "trouble": member.trouble or None,
        "open_connections": member.upstream.open_connections,
        "max_requests": spec.max_requests,
        "max_queued_tokens": spec.max_queued_tokens,
        "max_kv_fraction": spec.max_kv_fraction,
        "weight": spec.weight,
    }
    if worker is None or member.recognized is None:
        return shown
    columns, slot, facts = core.columns, worker.slot, worker.facts
    switchboard.advance()
    return shown | {
        "kind": member.recognized.kind,
        "models": facts.models,
        "lacks": sorted(facts.lacks),
        "role": facts.role,
        "block_size": facts.block_size,
        "kv_capacity_tokens": _number(facts.kv_capacity_tokens),
        "max_model_tokens": facts.max_model_tokens,
        "events": member.recognized.source and member.recognized.source.address,
        "events_from": _events_from(member),
        "inflight_requests": int(columns.requests[slot]),
        "waiting_requests": int(columns.waiting[slot]),
        "queued_prefill_tokens": _number(columns.queued_tokens(slice(slot, slot + 1))[0]),
        "context_tokens": _number(columns.context_tokens[slot]),
        "kv_used_tokens": _number(columns.kv_reported_tokens[slot]),
        "working_set_tokens": _number(core.following.wanted_tokens(slot)),
        "load_age_s": _number(now_s - columns.report_s[slot]),
        "prefill_tokens_per_s": _number(columns.prefill_tokens_per_s[slot]),
        "step_s": _number(columns.step_s[slot]),
        "resident_blocks": worker.kv.resident_blocks,
        "kv_known": worker.kv.known,
        "failures": worker.repute.failures,
        "ramp_share": _number(core.roster.ramps.share(member.worker_id, now_s)),
    }


def _events_from(member: Member) -> str | None:
    if isinstance(member.feed, ElectedFeed):
        return member.feed.source
    return None if member.feed is None else "read here"


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    value = float(value)
    return round(value, 6) if math.isfinite(value) else None

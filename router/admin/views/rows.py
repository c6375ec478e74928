"""Converts workers, trunks, the policy and decisions to the JSON that the admin port returns."""

from __future__ import annotations

import math
from typing import Any

from kvkernels import Trunk
from router.core.core import RouterCore
from router.core.placement.guard import PolicyGuard
from router.core.workers.table import Worker
from router.events.feed import ElectedFeed
from router.fleet.member import Member, skipped_events
from router.http.errors import ClientError
from router.http.messages import Request
from router.record.explain import everything, explanation, hits_of, name_of, why_there
from router.record.request_record import Attempt
from router.request.service import Service
from router.request.worker_hits import WorkerHits

_SHOWN_DEFAULT, _SHOWN_MAX = 20, 1_000


def worker_shown(service: Service, member: Member) -> dict[str, Any]:
    """Return all known facts about a worker, for JSON; few until its engine is recognized."""
    dispatcher, core, spec = service.dispatcher, service.dispatcher.core, member.spec
    worker = core.workers.get(member.worker_id)
    now_s = dispatcher.clock()
    shown: dict[str, Any] = {
        "id": member.worker_id,
        "url": spec.url,
        "rank": spec.rank,
        "state": "joining" if worker is None else worker.shown_state,
        "leaving": member.leaving,
        "leaving_s": None if member.leave is None else _number(now_s - member.leave.since_s),
        "role_to_be": None if member.turning is None else member.turning.role,
        "named_by": member.named.by,
        "trouble": member.trouble or None,
        "refused_ranks": member.named.refused_ranks,
        "open_connections": member.upstream.open_connections,
        "max_requests": spec.max_requests,
        "max_queued_tokens": spec.max_queued_tokens,
        "max_kv_fraction": spec.max_kv_fraction,
        "weight": spec.weight,
    }
    if worker is None or member.recognized is None:
        return shown
    columns, slot, facts = core.columns, worker.slot, worker.facts
    dispatcher.advance()
    shown |= _health_shown(worker, now_s) | hits_shown(service.hits, member, worker)
    return shown | {
        "kind": member.recognized.kind,
        "models": facts.models,
        "lacks": sorted(facts.lacks),
        "grpc": member.recognized.grpc,
        **{name: getattr(facts, name) for name in ("role", "group", "revision")},
        "block_size": facts.block_size,
        "kv_capacity_tokens": (kv_tokens := _number(columns.kv_capacity_tokens[slot])),
        "kv_capacity_learned": math.isnan(facts.kv_capacity_tokens) and kv_tokens is not None,
        "max_model_tokens": facts.max_model_tokens,
        "events": member.recognized.source and member.recognized.source.address,
        "events_from": _events_from(member, worker.kv.severed),
        "refused_models": member.recognized.refused_models,
        "advice": _advice(member, worker),
        "inflight_requests": int(columns.requests[slot]),
        "waiting_requests": int(columns.waiting[slot]),
        "queued_prefill_tokens": _number(columns.queued_tokens(slice(slot, slot + 1))[0]),
        "context_tokens": _number(columns.context_tokens[slot]),
        "kv_used_tokens": _number(columns.kv_reported_tokens[slot]),
        "working_set_tokens": _number(core.session_tracking.wanted_tokens(slot)),
        "load_age_s": _number(now_s - columns.report_s[slot]),
        "prefill_tokens_per_s": _number(columns.prefill_tokens_per_s[slot]),
        "step_s": _number(columns.step_s[slot]),
        "host_cached_tokens": _number(columns.host_cached_tokens[slot]),
        "host_tokens_per_s": _number(columns.host_tokens_per_s[slot]),
        "disk_cached_tokens": _number(columns.disk_cached_tokens[slot]),
        "disk_tokens_per_s": _number(columns.disk_tokens_per_s[slot]),
        **_events_shown(member, worker),
        "hit_confidence": _number(columns.hit_confidence[slot]),
        "silent_s": None if worker.silent is None else _number(now_s - worker.silent.since_s),
        "slow_start_share": _number(core.caches.slow_start.share(member.worker_id, now_s)),
    }


def _health_shown(worker: Worker, now_s: float) -> dict[str, Any]:
    left_s = _number(max(worker.spell.until_s - now_s, 0.0)) if worker.busy else None
    denied = sorted(worker.facts.denied)
    return {"failures": worker.health.failures, "busy_for_s": left_s, "denied_models": denied}


def _events_shown(member: Member, worker: Worker) -> dict[str, Any]:
    """Return the fields of a worker that come from its KV events."""
    return {
        "resident_blocks": worker.kv.resident_blocks,
        "kv_known": worker.kv.known,
        "kv_evicted_blocks": worker.kv.evicted_blocks,
        "kv_overflows": worker.kv.overflows,
        "events_skipped": dict(+skipped_events(member, worker)),
        "unknown_media": {} if member.feed is None else dict(member.feed.counters.unknown_media),
        "told_block_size": worker.told_block_size,
        "cache_groups": _groups_shown(worker),
        "mirrored": worker.kv.guessed,
    }


def hits_shown(hits: WorkerHits | None, member: Member, worker: Worker) -> dict[str, Any]:
    """Return for JSON how the router finds a worker's cache hits (the hit mode), the reason for
    this mode, and what the operator can do to get a better mode.
    """
    verdict = None if hits is None else hits.of(member, worker)
    return {"hits": None if verdict is None else verdict.shown()}


def _groups_shown(worker: Worker) -> list[dict[str, Any]] | None:
    """Return the cache groups that limit the hits of a hybrid model; None if only layers with full
    attention count.
    """
    blocks = worker.kv.blocks
    if not blocks.is_hybrid:
        return None
    names = ("group", "kind", "window_tokens", "block_size", "resident_blocks")
    return [dict(zip(names, group, strict=True)) for group in blocks.groups()]


_GUESSED_ADVICE = {
    "sizes": "its KV events have blocks of several sizes: the router estimates its cache",
    "useless": "the router estimates its cache: no KV event is usable (see events_skipped)",
}


def _advice(member: Member, worker: Worker) -> str | None:
    """Return advice for the operator of a worker, or None."""
    told, size = worker.told_block_size, worker.facts.block_size
    advice = member.advice
    if worker.kv.guessed is not None:
        advice = _GUESSED_ADVICE[worker.kv.guessed]
    elif told != size:
        advice = (
            f"its KV events come in blocks of {size} tokens, but it reports {told}: {size} is used"
        )
    return advice or None


def _events_from(member: Member, severed: bool) -> str | None:
    if member.feed is not None and not member.feed.counters.heard:
        return "connection lost"
    if member.feed is not None and severed:
        return (
            "connection was lost, and no replay or start time tells whether it is the same engine"
        )
    if isinstance(member.feed, ElectedFeed):
        return member.feed.source
    return None if member.feed is None else "read here"


def _number(value: float) -> float | None:
    """Return the value rounded, or None if it is not finite; JSON has neither NaN nor infinity."""
    value = float(value)
    return round(value, 6) if math.isfinite(value) else None


def shown_count(request: Request, name: str) -> int:
    """Return how many rows a query asks for: 1..1000, or 20 if the query has no number. Raises
    ClientError (400) for any other value.
    """
    text = request.query.get(name, str(_SHOWN_DEFAULT))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _SHOWN_MAX):
        raise ClientError(400, f"`{name}` must be 1..{_SHOWN_MAX}", name)
    return int(text)


def policy_shown(guard: PolicyGuard, now_s: float) -> dict[str, Any]:
    """Return for JSON the configured policy, the policy that makes the decisions now, and the
    counts of policy faults by kind. `suspended_for_s` is null if the policy is not suspended, and 0
    if it is tried again with the next request.
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


def trunks_shown(core: RouterCore, most: int) -> dict[str, Any]:
    """Return the prompt beginnings (trunks) with the greatest demand, at most `most`. If the policy
    does not use sessions, `followed` is false and there are no trunks.
    """
    sessions = core.session_tracking.sessions
    if sessions is None:
        return {"followed": False, "kept": 0, "trunks": []}
    rows = []
    for trunk in sessions.trunks.table()[:most]:
        copies = core.caches.copies(trunk.last_hash)
        saved = round(trunk.rate_per_s * trunk.tokens) if copies else 0
        rows.append(trunk_shown(trunk, copies) | {"saved_tokens_per_s": saved})
    return {"followed": True, "kept": len(sessions.trunks), "trunks": rows}


def trunk_shown(trunk: Trunk, copies: int) -> dict[str, Any]:
    """Return one trunk for JSON, with the number of workers that hold a copy."""
    return {
        "hash": f"{trunk.last_hash:016x}",
        "tokens": trunk.tokens,
        "share": round(trunk.share, 4),
        "requests_per_s": round(trunk.rate_per_s, 3),
        "demand": round(trunk.demand, 3),
        "copies": copies,
        "wanted_copies": trunk.wanted_copies,
    }


def decision_shown(attempt: Attempt, whole: bool = False) -> dict[str, Any]:
    """Return a dispatch and its outcome for JSON. With `whole`, include all data that the policy
    read, if the router kept it.
    """
    details = attempt.decision.details if whole else None
    return {
        "now_s": attempt.arrived_s,
        "model": attempt.model,
        "session": attempt.session,
        "group": attempt.identity.group,
        "parent": attempt.identity.parent,
        "tenant": attempt.tenant,
        **explanation(attempt.request_id, attempt.worker_id, attempt.decision, attempt.routed_by),
        "why": why_there(attempt),
        **hits_of(attempt),
        **name_of(attempt),
        "first_token_s": _rounded(attempt.first_token_s),
        "cached_tokens": attempt.cached_tokens,
        "worker_prompt_tokens": attempt.worker_prompt_tokens,
        "regret_s": _rounded(attempt.regret_s),
        "regret_hit_tokens": attempt.regret_hit_tokens,
        **({} if details is None else everything(details)),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)

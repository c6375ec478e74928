"""Diagnoses causes in an engine: it keeps no prefixes, its cache is too small, or it does not
report its hits.
"""

from __future__ import annotations

import math

from router.doctor.routing.facts import ExaminedWorker, PoolFacts
from router.doctor.routing.findings import Figure, RoutingVerdict, named, percent

_ENABLE_PREFIX_CACHE = {  # by kind of engine
    "vllm": "start the engine without --no-enable-prefix-caching",
    "sglang": "start the engine without --disable-radix-cache",
}
_ENABLE_CACHED_TOKENS = {
    "vllm": "start the engine with --enable-prompt-tokens-details",
    "sglang": "start the engine with --enable-cache-report",
}
_ENLARGE_KV_CACHE = {
    "vllm": "a larger --gpu-memory-utilization or --kv-offloading-size",
    "sglang": "a larger --mem-fraction-static, or --enable-hierarchical-cache",
    "warmroute": "a larger --kv-cache-free-gpu-mem-fraction, or --host-kv-tokens",
}
_RETENTION = "prefix_cache_retention_interval"
_REMOVED_SHARE = 0.5  # share of the stored blocks whose removal counts as high turnover


def prefix_caching_off(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose an engine that keeps no KV of a prompt for later prompts."""
    found = [one for one in facts.serving() if one.engine.prefix_caching is False]
    if not found:
        return None
    first = found[0]
    setting = next(
        k for k in ("enable_prefix_caching", "disable_radix_cache") if k in first.engine.settings
    )
    return RoutingVerdict(
        "The engine's prefix caching is off: it computes each prompt from its first token.",
        (Figure(f"{setting} {first.engine.settings[setting]}", "the engine's own settings"),),
        _ENABLE_PREFIX_CACHE.get(first.row.kind, "switch the engine's prefix caching on"),
        facts.weight(found),
        named(found),
    )


def cache_too_small(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose an engine whose cache is smaller than the prefixes that later requests need
    again.
    """
    found = [one for one in facts.serving() if _outgrown(one)] if facts.low else []
    if not found:
        return None
    first = found[0]
    row, events = first.row, first.events
    stored, removed = events.get("stored_blocks", 0), events.get("removed_blocks", 0)
    figures = [
        Figure(f"room for {row.kv_capacity_tokens or 0:,.0f} tokens", "GET /workers"),
        Figure(
            f"{removed:,.0f} of {stored:,.0f} blocks that it stored were evicted again",
            "warmroute_kv_events_total",
        ),
    ]
    if row.working_set_tokens:
        figures.append(
            Figure(f"its sessions want {row.working_set_tokens:,.0f} tokens again", "GET /workers")
        )
    return RoutingVerdict(
        "The engine's cache is too small for its traffic: prefixes are evicted before they "
        "are asked for again.",
        tuple(figures),
        _ENLARGE_KV_CACHE.get(row.kind, "more memory for the KV cache, or more workers"),
        facts.weight(found),
        named(found),
    )


def states_dropped(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose an engine that caches windows and layer states only at few places of a prompt."""
    found = [one for one in facts.serving() if _drops_states(one)] if facts.low else []
    if not found or not facts.decisions:
        return None
    first = found[0]
    kinds = sorted({group.kind for group in first.row.cache_groups or ()})
    return RoutingVerdict(
        "The engine keeps the windows and states of its layers at the ends of prompts alone: one "
        "that shares a shorter beginning finds nothing.",
        (
            Figure(f"{_RETENTION} {first.engine.settings[_RETENTION]}", "the engine's settings"),
            Figure(f"its caches are of the kinds {', '.join(kinds)}", "GET /workers"),
            Figure(f"workers reported {percent(facts.reported)} of prompt tokens", "GET /explain"),
        ),
        "--prefix-cache-retention-interval None of the engine (it keeps more blocks then)",
        0.5 * facts.weight(found),
        named(found),
    )


def hits_not_reported(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose an engine that finds prefixes in its cache, but does not report them in its
    answers.
    """
    found = [
        one
        for one in facts.serving()
        if one.row.kind in _ENABLE_CACHED_TOKENS and one.engine.hit_tokens > 0 and facts.of(one)
    ]
    if not found or not math.isnan(facts.reported):
        return None
    first = found[0]
    return RoutingVerdict(
        "The engine finds prefixes in its cache and does not report them in its answers.",
        (
            Figure(f"{first.engine.hit_tokens:,.0f} tokens found", "the engine's /metrics"),
            Figure(f"answers with cached_tokens: 0 of {len(facts.of(first))}", "GET /explain"),
        ),
        _ENABLE_CACHED_TOKENS[first.row.kind],
        0.0,
        named(found),
    )


def _drops_states(one: ExaminedWorker) -> bool:
    kinds = {group.kind for group in one.row.cache_groups or ()}
    return bool(kinds - {"full"}) and one.engine.settings.get(_RETENTION, "None") != "None"


def _outgrown(one: ExaminedWorker) -> bool:
    row, events = one.row, one.events
    room = row.kv_capacity_tokens or 0.0
    stored, removed = events.get("stored_blocks", 0.0), events.get("removed_blocks", 0.0)
    if not room or removed < _REMOVED_SHARE * stored or not removed:
        return False
    return row.working_set_tokens is None or row.working_set_tokens > 0.5 * room

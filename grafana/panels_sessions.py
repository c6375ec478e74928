"""Followed sessions: how many there are, who waits, and what they want of the workers."""

from __future__ import annotations

from grafana.panel import Panel, Row, per_worker, rate, selected

_WAITED = rate("warmroute_held_seconds_sum", by="standing")
_ENDED = rate("warmroute_held_seconds_count", by="standing")
_P99 = rate("warmroute_held_seconds_bucket", by="le")

SESSIONS = Row(
    "Sessions",
    (
        Panel(
            "Sessions followed",
            "Active: a request is under way. Idle: expected back. All 0 where the policy does not "
            "ask about them.",
            "suffix: sessions",
            ((selected("warmroute_sessions"), "{{state}}"),),
            6,
            names=("active", "idle"),
        ),
        Panel(
            "Held, by the standing of their session",
            "New: its first request. Cold: its cache was lost. Warm: its cache is still there. "
            "Cold ones go before new ones.",
            "suffix: requests",
            ((selected("warmroute_held_sessions"), "{{standing}}"),),
            6,
            names=("new", "cold", "warm"),
        ),
        Panel(
            "Wait at the router",
            "Of requests that were held, from arrival to the end of the wait: mean by the standing "
            "of their session, and p99 of all. Their time to the first token includes it.",
            "s",
            (
                (f"{_WAITED} / {_ENDED}", "{{standing}}"),
                (f"histogram_quantile(0.99, {_P99})", "p99"),
            ),
            6,
            names=("new", "cold", "warm"),
        ),
        Panel(
            "Working set",
            "KV tokens that sessions at home on a worker will want again, each by its chance to "
            "return. More than its memory: caches are lost before they are used again.",
            "suffix: tokens",
            per_worker("warmroute_worker_working_set_tokens"),
            6,
        ),
        Panel(
            "Working set, to compute again",
            "Prefill time of a worker for all of its working set.",
            "s",
            per_worker("warmroute_worker_working_set_seconds"),
            6,
        ),
        Panel(
            "Bounds",
            "Sessions forgotten before they were over (limits.sessions), and blocks of prompts "
            "forgotten (limits.session_blocks). Above 0 for long: raise them.",
            "suffix: per s",
            (
                (rate("warmroute_forgotten_sessions_total"), "forgotten"),
                (rate("warmroute_evicted_session_blocks_total"), "forgotten blocks"),
            ),
            6,
        ),
        Panel(
            "Heads that prompts share",
            "Shared: heads kept, each begins many sessions' prompts. Hot: of these, so much in "
            "demand that more than one worker should hold it. Given way: to another, per s.",
            "suffix: heads",
            (
                (selected("warmroute_trunks"), "shared"),
                (selected("warmroute_hot_trunks"), "hot"),
                (rate("warmroute_replaced_trunks_total"), "given way"),
            ),
            6,
        ),
        Panel(
            "Copies of the heads most in demand",
            "By rank in demand: workers that hold the head, and workers that should. Demand: "
            "seconds of work per second that its prompts bring.",
            "short",
            (
                (selected("warmroute_trunk_copies"), "copies, rank {{rank}}"),
                (selected("warmroute_trunk_wanted_copies"), "wanted, rank {{rank}}"),
                (selected("warmroute_trunk_demand"), "demand, rank {{rank}}"),
            ),
            6,
        ),
    ),
)

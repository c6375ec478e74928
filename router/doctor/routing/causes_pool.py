"""Diagnoses causes in the router and around it: its policy, its index, and other routes to the
engines.
"""

from __future__ import annotations

import math

from router.doctor.routing.facts import ExaminedWorker, PoolFacts
from router.doctor.routing.findings import Figure, RoutingVerdict, named, percent

_CACHE_BLIND_POLICIES = frozenset(
    {
        *("round_robin", "random", "least_requests", "power_of_two", "kv_load"),
        *("least_load", "least_tokens", "prequal"),
    }
)
_MIN_LOST_SHARE = 0.1  # share of prompt tokens
_MIN_FOREIGN_REQUESTS = 3  # requests


def policy_blind(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a policy that chooses workers without regard to which worker has a prompt cached."""
    blind = _base(facts.policy.policy) in _CACHE_BLIND_POLICIES
    if (
        not (blind or _base(facts.policy.deciding) in _CACHE_BLIND_POLICIES)
        or not facts.prompt_tokens
    ):
        return None
    lost = sum(one.elsewhere_tokens for one in facts.decisions) / facts.prompt_tokens
    if len(list(facts.serving())) < 2 or (lost < _MIN_LOST_SHARE and not (facts.low and blind)):
        return None
    figures = [
        Figure(f"policy {facts.policy.policy}, deciding {facts.policy.deciding}", "GET /policy"),
        Figure(f"{percent(lost)} of prompt tokens were at another worker", "GET /explain"),
    ]
    if blind:
        wrong = "The routing policy does not look at caches."
        change = "--policy warmset"
    else:
        wrong = "The policy is suspended for faults, and the one that decides is blind to caches."
        change = "--policy warmset, until the policy's last_fault in GET /policy is mended"
    return RoutingVerdict(wrong, tuple(figures), change, max(lost, _MIN_LOST_SHARE))


def index_too_small(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a router whose index is too small, so that it forgets blocks that engines still
    hold.
    """
    found = [one for one in facts.serving() if one.row.kv_evicted_blocks]
    if not found or not facts.index_evicted:
        return None
    forgotten = sum(one.row.kv_evicted_blocks for one in found)
    return RoutingVerdict(
        "The router's index is full: it forgets blocks that the engines still hold.",
        (
            Figure(f"{forgotten:,} blocks of these workers forgotten", "GET /workers"),
            Figure(f"{facts.index_evicted:,.0f} in all", "warmroute_index_evicted_blocks_total"),
        ),
        "a larger limits.index_entries (and limits.index_bytes)",
        facts.weight(found),
        named(found),
    )


def routers_apart(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose several routers that use the same engines and do not share their state."""
    common = {url: len(theirs & _urls(facts)) for url, theirs in facts.others.items()}
    apart = {url: count for url, count in common.items() if count}
    if not apart or facts.sharing:
        return None
    shown = ", ".join(f"{url}: {count} of these workers" for url, count in apart.items())
    return RoutingVerdict(
        "Several routers send requests to the same engines and do not share their state.",
        (
            Figure(shown, "GET /workers of each"),
            Figure("routers that this one shares with: none", "warmroute_replicas_peers"),
        ),
        "--state redis://HOST:6379, the same for all these routers",
    )


def passed_by(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose requests that reach the engines without this router."""
    found = [one for one in facts.serving() if _foreign(one) > 0]
    if not found or routers_apart(facts) is not None:
        return None
    theirs, ours = sum(map(_foreign, found)), sum(_finite(one.answered) for one in found)
    return RoutingVerdict(
        "Clients pass by this router: the engines get requests that it did not send.",
        (
            Figure(
                f"{theirs:.0f} requests of others beside {ours:.0f} of this router",
                "the engines' /metrics beside warmroute_replies_total, "
                "warmroute_worker_foreign_requests",
            ),
        ),
        "the base URL of these clients: this router; other routers: --state, to share",
        theirs / max(theirs + ours, 1.0),
        named(found),
    )


def _foreign(one: ExaminedWorker) -> float:
    """Return how many requests of other senders the worker had during the watch. Requests that
    began before the watch or ended after it are allowed for.
    """
    counted = one.row.rank is None  # else the engine's counts are of several workers
    extra = _finite(one.engine.finished - one.answered) if counted else 0.0
    slack = max(_MIN_FOREIGN_REQUESTS, 0.1 * _finite(one.engine.finished)) + one.inflight
    return max(extra if extra > slack else 0.0, one.foreign)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _urls(facts: PoolFacts) -> frozenset[str]:
    return frozenset(one.row.url for one in facts.workers)


def _base(policy: str) -> str:
    return policy.partition("|")[0].partition("?")[0]

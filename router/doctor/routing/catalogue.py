"""Lists the known causes of low cache hits, and judges which of them hold."""

from __future__ import annotations

from router.doctor.routing import causes_engine as engine
from router.doctor.routing import causes_events as events
from router.doctor.routing import causes_pool as pool
from router.doctor.routing import causes_prompts as prompts
from router.doctor.routing.facts import PoolFacts
from router.doctor.routing.findings import RoutingCause, RoutingFinding

# Among causes that affect equally many tokens, the one that explains the others is first.
ROUTING_CAUSES = (
    RoutingCause("prefix-caching-off", "the engine keeps no prefixes", engine.prefix_caching_off),
    RoutingCause("events-off", "the engine publishes no KV events", events.events_off),
    RoutingCause("events-not-read", "the router reads no KV events", events.events_not_read),
    RoutingCause(
        "events-elsewhere", "KV events do not come where they are read", events.events_elsewhere
    ),
    RoutingCause("block-sizes", "blocks of different sizes", events.block_sizes),
    RoutingCause(
        "attribution-changes", "a line of each request's own", prompts.attribution_changes
    ),
    RoutingCause("no-tokenizer", "prompts are read as text", prompts.no_tokenizer),
    RoutingCause("tokenizer-differs", "another tokenizer", prompts.tokenizer_differs),
    RoutingCause("template-differs", "another chat template", prompts.template_differs),
    RoutingCause("tokens-differ", "tokenizer or template differ", prompts.tokens_differ),
    RoutingCause("template-refuses", "prompts cannot be rendered", prompts.template_refuses),
    RoutingCause("lora-names", "an adapter has two names", prompts.lora_names),
    RoutingCause("salts", "a salt for each request", prompts.salts),
    RoutingCause("heads-differ", "prompts differ in their heads", prompts.heads_differ),
    RoutingCause("short-prompts", "prompts are shorter than a block", prompts.short_prompts),
    RoutingCause("policy-blind", "the policy does not look at caches", pool.policy_blind),
    RoutingCause("index-too-small", "the router forgets blocks", pool.index_too_small),
    RoutingCause("routers-apart", "routers do not share their state", pool.routers_apart),
    RoutingCause("passed-by", "requests pass by the router", pool.passed_by),
    RoutingCause("cache-too-small", "prefixes are evicted too soon", engine.cache_too_small),
    RoutingCause("states-dropped", "windows and states are dropped", engine.states_dropped),
    RoutingCause("events-missed", "KV events were lost", events.events_missed),
    RoutingCause("refuted", "answers refute KV events", events.refuted),
    RoutingCause("hits-not-reported", "hits are not reported", engine.hits_not_reported),
)
# This cause is reported only if no other one is found.
_LAST = RoutingCause("nothing-shared", "no two prompts begin alike", prompts.nothing_shared)
ALL_ROUTING_CAUSES = (*ROUTING_CAUSES, _LAST)


def judge_routing(facts: PoolFacts) -> tuple[RoutingFinding, ...]:
    """Return the causes that hold, the one that affects the most prompt tokens first."""
    found = [
        RoutingFinding(cause, verdict)
        for cause in ROUTING_CAUSES
        if (verdict := cause.judge(facts)) is not None
    ]
    if not found and (verdict := _LAST.judge(facts)) is not None:
        found.append(RoutingFinding(_LAST, verdict))
    return tuple(sorted(found, key=lambda one: -round(one.verdict.weight, 1)))

"""Diagnoses causes in prompts: how the router reads them, and what their beginnings have
in common.
"""

from __future__ import annotations

import math
from statistics import median_low

from router.doctor.routing.facts import LOW_SHARE, PoolFacts
from router.doctor.routing.findings import Figure, RoutingVerdict, named, percent

_MIN_REQUESTS = 4  # fewest requests that are compared
_RULE_SHARE = 0.5  # share of requests from which a property counts as the rule
_LEAST_STRETCH = 256  # bytes
_EXPLAIN = "GET /explain"
_TOKENIZE = "the engines' /tokenize beside the --tokenizer folder"


def no_tokenizer(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a router without a tokenizer, which cannot match text prompts with engines' KV
    events.
    """
    share = _approximate(facts)
    if facts.alone or facts.tokenizer_exact or share < _RULE_SHARE or not facts.low:
        return None
    return RoutingVerdict(
        "The router reads prompts as text, for it has no tokenizer, and cannot match KV events.",
        (
            Figure(f"{percent(share)} of prompt tokens are approximate", _EXPLAIN),
            Figure("models with a tokenizer: 0", "warmroute_tokenizer_exact"),
        ),
        "--tokenizer DIR: the model's folder, as the engines serve it; or vLLM with "
        "--enable-scale-out, which the router then asks for token ids",
        share,
    )


def tokenizer_differs(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a tokenizer folder whose tokenizer makes other token ids of a text than the engines
    do.
    """
    tokens = facts.tokens
    if tokens is None or not tokens.other_texts:
        return None
    return RoutingVerdict(
        "The tokenizer in the folder makes other tokens of a plain text than the engines do.",
        (
            Figure(f"{tokens.other_texts} of {tokens.texts} texts differ", _TOKENIZE),
            Figure(f"{tokens.other_chats} of {tokens.chats} chats differ", _TOKENIZE),
        ),
        "--tokenizer DIR of the router: the folder that the engines serve",
    )


def template_differs(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a tokenizer folder whose tokenizer agrees with the engines, but whose chat template
    differs from theirs.
    """
    tokens = facts.tokens
    if tokens is None or tokens.other_texts or not tokens.other_chats:
        return None
    return RoutingVerdict(
        "The folder's chat template renders chats otherwise than the engines' does.",
        (
            Figure(f"{tokens.other_chats} of {tokens.chats} chats differ", _TOKENIZE),
            Figure(f"{tokens.other_texts} of {tokens.texts} texts differ", _TOKENIZE),
        ),
        "chat_template.jinja in the router's --tokenizer folder: the engines' own; or "
        "chat_template_kwargs, if the engines have defaults",
    )


def tokens_differ(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a router whose tokenizer or chat template makes other token ids of a prompt than the
    engine does.
    """
    models = sorted(name for name, exact in facts.tokenizer_exact.items() if not exact)
    told = facts.tokens
    if not models or (told is not None and told.other_texts + told.other_chats):
        return None
    counted = sum(facts.mismatches.get(name, 0.0) for name in models)
    share = _approximate(facts)
    return RoutingVerdict(
        "The router's tokenizer or chat template makes other tokens of a prompt than the engine's.",
        (
            Figure(f"not trusted for {', '.join(models)[:200]}", "warmroute_tokenizer_exact"),
            Figure(f"{counted:.0f} prompts differed", "warmroute_tokenizer_mismatch_total"),
            Figure(f"{percent(share)} of prompt tokens are approximate", _EXPLAIN),
        ),
        "--tokenizer DIR: the folder that the engines serve, with their chat template and "
        "chat_template_kwargs",
        share if math.isfinite(share) else 1.0,
    )


def template_refuses(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a chat template of the router that cannot render the prompts."""
    share = _approximate(facts)
    exact = facts.tokenizer_exact and all(facts.tokenizer_exact.values())
    if not exact or not facts.template_refusals or share < _RULE_SHARE or not facts.low:
        return None
    return RoutingVerdict(
        "The router's tokenizer is right, but it cannot render these prompts as the engine does.",
        (
            Figure(f"{facts.template_refusals:.0f} prompts", "warmroute_template_refusals_total"),
            Figure(f"{percent(share)} of prompt tokens are approximate", _EXPLAIN),
        ),
        "chat_template of requests (the engine's own is needed), or limits.tokenized_chars",
        share,
    )


def short_prompts(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose prompts that are shorter than a block. Engines cache only whole blocks, so they keep
    nothing of such prompts.
    """
    sizes = [one.row.block_size for one in facts.serving() if one.row.block_size]
    if len(facts.decisions) < _MIN_REQUESTS or not sizes or not facts.low:
        return None
    usual = median_low(one.prompt_tokens for one in facts.decisions)
    if usual > min(sizes):
        return None
    return RoutingVerdict(
        "Prompts are shorter than a block of the cache, and only whole blocks are found again.",
        (
            Figure(f"half of the prompts have at most {usual} tokens", _EXPLAIN),
            Figure(f"blocks have {min(sizes)} tokens", "GET /workers"),
        ),
        "a smaller --block-size of the engine",
    )


def salts(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose requests that have different cache salts, so that they cannot share cached
    prefixes.
    """
    given = facts.given
    if given is None or given.salted < max(_MIN_REQUESTS, _RULE_SHARE * given.count):
        return None
    if given.salts < _RULE_SHARE * given.salted:
        return None
    return RoutingVerdict(
        "Each request has a cache_salt of its own, so none finds what another one computed.",
        (Figure(f"{given.salts} salts in {given.salted} requests", "--requests"),),
        "cache_salt of clients: one for all who may share, such as a tenant's",
        given.salted / given.count,
    )


def attribution_changes(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose clients that put a line in front of each prompt, with content that changes from
    request to request.
    """
    changed, same = facts.changed_attributions, facts.same_attributions
    if changed < max(_MIN_REQUESTS, _RULE_SHARE * (changed + same)) or not facts.low:
        return None
    return RoutingVerdict(
        "Claude Code puts an attribution line before its prompts that changes with each request.",
        (
            Figure(
                f"it changed in {changed:.0f} of {changed + same:.0f} requests of a session",
                "warmroute_attribution_lines_total",
            ),
            Figure(f"{percent(facts.hit_share)} of prompt tokens were cached", _EXPLAIN),
        ),
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0 in the environment of Claude Code, or a later release of "
        "it (2.1.181); or vLLM since March 2026, which leaves the line out",
        changed / (changed + same),
    )


def heads_differ(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose prompts that each begin with different text, before the part that all of
    them share.
    """
    given = facts.given
    if given is None or given.count < _MIN_REQUESTS or given.later < _LEAST_STRETCH:
        return None
    if given.common > LOW_SHARE * (given.common + given.later):
        return None
    figures = [
        Figure(
            f"prompts part after {given.common} bytes, and then share {given.later:,} more",
            "--requests",
        )
    ]
    if given.differs:
        figures.append(Figure(f"there one has {given.differs!r}", "--requests"))
    return RoutingVerdict(
        "Text of each request's own is at the head of its prompt, before what all prompts share.",
        tuple(figures),
        "what differs goes to the end of the prompt; CLAUDE_CODE_ATTRIBUTION_HEADER=0 takes "
        "Claude Code's line away",
    )


def lora_names(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose a LoRA adapter that has another name in KV events than in requests."""
    adapters = frozenset().union(*(one.engine.adapters for one in facts.workers))
    rows = [one for one in facts.decisions if one.model in adapters and not one.approximate]
    told = [one for one in rows if one.cached_tokens is not None]
    tokens = sum(one.prompt_tokens for one in told)
    cached = sum(one.cached_tokens or 0 for one in told)
    expected = sum(one.expected_hit_tokens for one in told)
    if len(told) < _MIN_REQUESTS or cached < LOW_SHARE * tokens or expected > 0.1 * cached:
        return None
    names = sorted({one.model for one in told})
    found = [one for one in facts.workers if one.engine.adapters & set(names)]
    return RoutingVerdict(
        "KV events call a LoRA adapter by another name than requests do.",
        (
            Figure(f"adapters {', '.join(names)[:200]}", "the engine's /v1/models"),
            Figure(f"expected {expected:,} tokens, found {cached:,}", _EXPLAIN),
        ),
        "--lora-modules NAME=PATH of the engine: the name that clients ask for",
        tokens / max(facts.prompt_tokens, 1),
        named(found),
    )


def nothing_shared(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose prompts of which no two seem to begin alike."""
    if facts.alone:
        return _nothing_found(facts)
    rows = [one for one in facts.decisions if not one.approximate]
    heard = [one for one in facts.serving() if one.events.get("stored_blocks", 0)]
    hits = sum(one.expected_hit_tokens + (one.cached_tokens or 0) for one in rows)
    if len(rows) < 2 * _MIN_REQUESTS or hits or not heard:
        return None
    stored = sum(one.events.get("stored_blocks", 0) for one in heard)
    return RoutingVerdict(
        "No prompt begins as an earlier one did, not even in its first block.",
        (
            Figure(f"0 tokens expected or found in {len(rows)} requests", _EXPLAIN),
            Figure(f"engines stored {stored:,.0f} new blocks", "warmroute_kv_events_total"),
        ),
        "give --requests FILE: it tells whether salts or the heads of prompts differ",
        0.0,
    )


def _nothing_found(facts: PoolFacts) -> RoutingVerdict | None:
    """Diagnose prompts of which no two seem to begin alike, as `nothing_shared` does, but only from
    the counts of engines.
    """
    if facts.found_tokens or not facts.looked_up_tokens:
        return None
    looked_up = f"0 of {facts.looked_up_tokens:,.0f} prompt tokens {facts.of_when}"
    return RoutingVerdict(
        "No prompt begins as an earlier one at the same engine did.",
        (Figure(f"{looked_up} were in a cache", "the engines' /metrics"),),
        "give --requests FILE: it tells whether salts or the heads of prompts differ; or send "
        "prompts that begin alike to one engine, by a router",
        0.0,
    )


def _approximate(facts: PoolFacts) -> float:
    """Return the share of judged prompt tokens that the router read as text, not as token ids; NaN
    if there are no requests.
    """
    if not facts.prompt_tokens:
        return math.nan
    there = sum(one.prompt_tokens for one in facts.decisions if one.approximate)
    return there / facts.prompt_tokens

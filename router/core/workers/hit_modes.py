"""Judges how exact the expected cache hits of a worker are, and says what would make them exact.
The table `CAUSES` has for each cause the mode that it leads to, its reason in one sentence, and the
flag, package or folder that would remove it. The worst mode comes first, so the first cause that
holds decides. `docs/operations.md` shows the same table to operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from router.core.workers.kv_state import Guess

HitMode = Literal["exact", "degraded", "approximate"]
# The state of the router's token ids of a worker's prompts. "none": there is no tokenizer, nor
# a renderer; "differ": the worker makes other ids; "tools": of chats with tools only; "unchecked":
# nobody has compared them yet; "checked": they agree.
# "beginning": of a request only the first ones are known yet.
# "refused": the engine could make them and was started so that it does not; "failing": its renderer
# does not answer; "miscounted": its renderer counts other tokens than it does.
TokenState = Literal[
    "none",
    "refused",
    "failing",
    "miscounted",
    "differ",
    "tools",
    "beginning",
    "unchecked",
    "checked",
]


@dataclass(frozen=True, slots=True)
class HitFacts:
    """The facts that decide how exact the expected hits of a worker are (its hit mode). The
    defaults are the facts of a worker with exact hits. Lifetime: call.
    """

    tokens: TokenState = "checked"
    render_flag: str | None = None  # lets the engine make token ids for the router
    is_caching: bool = True  # False: the engine keeps no prefixes
    caching_flag: str | None = None  # switches the engine's prefix caching on
    has_events: bool = True  # the router reads its KV events
    events_none: bool = False  # its operator said events=none
    events_refused: bool = False  # it names another host for its events
    events_flag: str | None = None  # switches the engine's KV events on; None: it has none
    guessed: Guess | None = None  # why its events are of no use
    is_connected: bool = True  # to the publisher of its events
    severed: bool = False  # a connection was lost, and the engine may be another one since
    known: bool = True  # no KV event is missing
    resyncing: bool = False  # missing events were asked for
    has_replay: bool = True  # the engine can send missed events, or its whole cache, again
    replay_flag: str | None = None  # lets the engine do that
    buffer_flag: str | None = None  # lets the engine keep more events for that
    forgotten_blocks: int = 0  # dropped by the router's index at its bound
    overflows: int = 0  # how often it reported more blocks than fit
    confidence: float = 1.0  # share of its hits that counts
    is_hybrid: bool = False  # its hits are limited by windows or states, and they are followed
    has_full_attention: bool = True  # in some layers; False: its events reported none
    lower_tier_blocks: int = 0  # known in its host memory or on its disk alone
    leaves_out_groups: bool = False  # its events do not report the windows or states that it has
    other_windows: int = 0  # events of attention windows that are not followed
    repeats_last_block: bool = False  # its answers show that it computes a hit's last block again
    skips: Mapping[str, int] = field(default_factory=dict)  # events that changed nothing, by reason


@dataclass(frozen=True, slots=True)
class HitVerdict:
    """A worker's hit mode, which says how exact its expected hits are, with the cause, the reason
    and what would remove the cause. Lifetime: call.
    """

    mode: HitMode
    cause: str = ""  # one of CAUSES; empty: exact
    reason: str = ""  # one sentence
    lift: str | None = None  # flag, package or folder; None: an operator cannot change it

    def shown(self) -> dict[str, str | None]:
        """Return the parts of the verdict for JSON; a part is null if it is empty."""
        cause, reason = self.cause or None, self.reason or None
        return {"mode": self.mode, "cause": cause, "reason": reason, "lift": self.lift}


Lift = str | Callable[[HitFacts], str | None] | None


@dataclass(frozen=True, slots=True)
class HitCause:
    """A condition that decides how exact the expected hits of a worker are. Lifetime: process."""

    name: str
    mode: HitMode
    holds: Callable[[HitFacts], bool]
    reason: str
    lift: Lift = None


EXACT = HitVerdict("exact")
_TOKENIZER = "--tokenizer DIR"
# Reasons why an event cannot be read, or its blocks cannot be kept. Unfinished blocks, as
# `token_count` and `other_block_size` count them, cannot be found again.
_UNREAD = (
    *("bad_hashes", "bad_tokens", "bad_block_size", "bad_extra_keys", "bad_field"),
    *("unknown_type", "unknown_medium", "over_limit", "no_room", "chunk_size", "never_removed"),
)


def _has_no_full_group(facts: HitFacts) -> bool:
    """Return True if the KV events name only some blocks of sliding windows, without a cache group
    of full attention, so that it is unknown which blocks are meant.
    """
    return facts.skips.get("masked", 0) > 0 and not facts.has_full_attention


CAUSES: tuple[HitCause, ...] = (
    HitCause(
        "prefix-caching-off",
        "approximate",
        lambda f: not f.is_caching,
        "The engine's prefix caching is off: it computes each prompt from its first token.",
        lambda f: f.caching_flag,
    ),
    HitCause(
        "events-refused",
        "approximate",
        lambda f: not f.has_events and f.events_refused,
        "The engine names another host than its own for its KV events, so they are not read.",
        "event_hosts: [HOST]",
    ),
    HitCause(
        "events-none",
        "approximate",
        lambda f: not f.has_events and f.events_none,
        "The worker's line has events=none, so a mirror of the router's own requests stands in.",
        "events=none out of the worker's line",
    ),
    HitCause(
        "no-events",
        "approximate",
        lambda f: not f.has_events,
        "The engine publishes no KV events, so a mirror of the router's own requests stands in.",
        lambda f: f.events_flag,
    ),
    HitCause(
        "block-sizes",
        "approximate",
        lambda f: f.guessed == "sizes",
        "The engine's KV events have blocks of several sizes, so the router estimates its cache.",
        "block_size= out of the worker's line",
    ),
    HitCause(
        "no-full-group",
        "approximate",
        lambda f: f.guessed == "useless" and _has_no_full_group(f),
        "No layers of the model have full attention, and its events name blocks by a rule that the "
        "router does not know, so the router estimates the cache.",
        "PYTHONHASHSEED=0 in the environment of vLLM",
    ),
    HitCause(
        "events-useless",
        "approximate",
        lambda f: f.guessed is not None,
        "None of the engine's KV events can be used, as events_skipped says, so the router "
        "estimates its cache.",
    ),
    HitCause(
        "no-tokenizer",
        "approximate",
        lambda f: f.tokens == "none",
        "The router has no tokenizer, so it matches prompts as text; prompts of token ids are "
        "exact.",
        _TOKENIZER,
    ),
    HitCause(
        "render-off",
        "approximate",
        lambda f: f.tokens == "refused",
        "The router has no tokenizer, and the engine's API for token ids is off, so the router "
        "matches prompts as text; prompts of token ids are exact.",
        lambda f: f"{_TOKENIZER}, or {f.render_flag}" if f.render_flag else _TOKENIZER,
    ),
    HitCause(
        "renderer-failing",
        "approximate",
        lambda f: f.tokens == "failing",
        "No renderer of the model's token ids answers in time, so prompts are matched as text "
        "until one does.",
        "renderers: a server that answers",
    ),
    HitCause(
        "renderer-differs",
        "approximate",
        lambda f: f.tokens == "miscounted",
        "The renderer counts other tokens than the engine, so prompts are matched as text.",
        "renderers: one with the engine's model and flags",
    ),
    HitCause(
        "tokens-differ",
        "approximate",
        lambda f: f.tokens == "differ",
        "The router's tokenizer or chat template makes other tokens than the engine, so prompts "
        "are matched as text.",
        "--tokenizer DIR: the folder that the engine serves",
    ),
    HitCause(
        "connection-lost",
        "degraded",
        lambda f: not f.is_connected,
        "The connection to the engine's KV events is lost, so its hits are those of before.",
        "the address in events=, or the network between",
    ),
    HitCause(
        "severed",
        "degraded",
        lambda f: f.severed,
        "The connection to the engine's KV events was lost, and nothing proves yet that the engine "
        "was not restarted.",
        lambda f: None if f.has_replay else f.replay_flag,
    ),
    HitCause(
        "index-full",
        "degraded",
        lambda f: not f.known and f.forgotten_blocks > 0,
        "The router's index is full and forgot blocks that the engine holds: hits are a lower "
        "bound.",
        "limits.index_entries",
    ),
    HitCause(
        "overflow",
        "degraded",
        lambda f: not f.known and f.overflows > 0,
        "The engine's KV events told of more blocks than it has room for, so all were forgotten: "
        "hits are a lower bound.",
        "events= of the worker: this engine's own address",
    ),
    HitCause(
        "replaying",
        "degraded",
        lambda f: not f.known and f.resyncing and f.has_replay,
        "KV events are missing and were asked for again: hits are a lower bound until they come.",
    ),
    HitCause(
        "events-missed",
        "degraded",
        lambda f: not f.known and f.has_replay,
        "KV events are missing that the engine no longer has: hits are a lower bound until its "
        "cache has turned over.",
        lambda f: f.buffer_flag,
    ),
    HitCause(
        "no-replay",
        "degraded",
        lambda f: not f.known,
        "KV events were missed and the engine cannot send them again: hits are a lower bound "
        "until its cache has turned over.",
        lambda f: f.replay_flag,
    ),
    HitCause(
        "refuted",
        "degraded",
        lambda f: f.confidence < 1.0,
        "The engine's answers find less in its cache than its KV events promise, so its hits count "
        "in part.",
        "events= of the worker: this engine's own address",
    ),
    HitCause(
        "masked-events",
        "degraded",
        _has_no_full_group,
        "No layers of the model have full attention, and some events name blocks that the router "
        "cannot find, as of adapters, salts and images: hits are a lower bound.",
    ),
    HitCause(
        "groups-left-out",
        "degraded",
        lambda f: f.leaves_out_groups,
        "The engine's KV events tell of full attention alone, and the model has windows or states, "
        "too: hits are an upper bound.",
    ),
    HitCause(
        "windows",
        "degraded",
        lambda f: f.other_windows > 0,
        "The model has several attention windows and only the largest is counted: hits are an "
        "upper bound.",
    ),
    HitCause(
        "unknown-group",
        "degraded",
        lambda f: f.skips.get("other_group", 0) > 0 and not (f.is_hybrid and f.lower_tier_blocks),
        "The engine has caches of a kind that the router does not know: hits are an upper bound.",
    ),
    HitCause(
        "hybrid-tiers",
        "degraded",
        lambda f: f.is_hybrid and f.lower_tier_blocks > 0,
        "Windows and states in host memory or on disk are not followed: hits from there are not "
        "exact.",
    ),
    HitCause(
        "drafts-and-windows",
        "degraded",
        lambda f: f.is_hybrid and f.repeats_last_block,
        "The engine computes the last block of each hit again, as vLLM does for EAGLE and MTP "
        "heads, and wants more of its windows for that: hits may be too high where a prompt is "
        "cut short.",
    ),
    HitCause(
        "placeholders",
        "degraded",
        lambda f: f.skips.get("unknown_names", 0) > 0,
        "Some KV events name blocks without their tokens, so blocks in host memory or on disk may "
        "be missed.",
        '"self_describing_kv_events": true in the engine\'s kv_connector_extra_config',
    ),
    HitCause(
        "events-unread",
        "degraded",
        lambda f: any(f.skips.get(why) for why in _UNREAD),
        "Some of the engine's KV events cannot be used, as events_skipped says: hits are a lower "
        "bound.",
    ),
    HitCause(
        "tools-differ",
        "degraded",
        lambda f: f.tokens == "tools",
        "The chat template writes tools otherwise than the engine, so chats with tools are "
        "matched as text.",
        "chat_template.jinja in the folder of --tokenizer: the engine's own",
    ),
    HitCause(
        "beginning-alone",
        "degraded",
        lambda f: f.tokens == "beginning",
        "Of this turn of a long conversation the router knows the token ids of the earlier turns "
        "alone, as it did not wait for its renderer: hits are a lower bound by about an answer.",
        "limits.token_memo_bytes: 0",
    ),
    HitCause(
        "tokens-unchecked",
        "degraded",
        lambda f: f.tokens == "unchecked",
        "The router's token ids were not compared with the engine's yet: its /tokenize, or the "
        "usage of an answer, does that.",
    ),
    HitCause(
        "last-block",
        "exact",
        lambda f: f.repeats_last_block,
        "The engine computes the last block of each hit again, as vLLM does for EAGLE and MTP "
        "heads, and its expected hits are counted without it.",
    ),
)


def hit_verdict(facts: HitFacts) -> HitVerdict:
    """Return how exact a worker's expected hits are. The first cause in `CAUSES` that holds
    decides; if none holds, the hits are exact.
    """
    for cause in CAUSES:
        if cause.holds(facts):
            lift = cause.lift(facts) if callable(cause.lift) else cause.lift
            return HitVerdict(cause.mode, cause.name, cause.reason, lift)
    return EXACT

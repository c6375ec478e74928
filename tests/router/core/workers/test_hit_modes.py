"""Tests of how exact a worker's hits are: one set of facts for each cause, and which cause is named
first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from router.core.workers.hit_modes import CAUSES, EXACT, HitFacts, hit_verdict

ROOT = Path(__file__).parents[4]
FLAGS = {
    "caching_flag": "CACHING",
    "events_flag": "EVENTS",
    "replay_flag": "REPLAY",
    "buffer_flag": "BUFFER",
}
ALONE = {"has_full_attention": False}
HASHES = "PYTHONHASHSEED=0 in the environment of vLLM"
MISSING: dict[str, Any] = {"known": False}
# By cause: facts that lead to it, and what would lift it.
FACTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "prefix-caching-off": ({"is_caching": False}, "CACHING"),
    "events-refused": ({"has_events": False, "events_refused": True}, "event_hosts: [HOST]"),
    "events-none": (
        {"has_events": False, "events_none": True},
        "events=none out of the worker's line",
    ),
    "no-events": ({"has_events": False, **MISSING}, "EVENTS"),
    "block-sizes": ({"guessed": "sizes", **MISSING}, "block_size= out of the worker's line"),
    "no-full-group": ({"guessed": "useless", "skips": {"masked": 20}, **ALONE}, HASHES),
    "events-useless": ({"guessed": "useless", "skips": {"bad_tokens": 20}}, None),
    "no-tokenizer": ({"tokens": "none"}, "--tokenizer DIR"),
    "render-off": ({"tokens": "refused", "render_flag": "RENDER"}, "--tokenizer DIR, or RENDER"),
    "renderer-failing": ({"tokens": "failing"}, "renderers: a server that answers"),
    "renderer-differs": (
        {"tokens": "miscounted"},
        "renderers: one with the engine's model and flags",
    ),
    "tokens-differ": ({"tokens": "differ"}, "--tokenizer DIR: the folder that the engine serves"),
    "connection-lost": (
        {"is_connected": False, "severed": True, **MISSING},
        "the address in events=, or the network between",
    ),
    "severed": ({"severed": True, "has_replay": False, **MISSING}, "REPLAY"),
    "index-full": ({"forgotten_blocks": 1, **MISSING}, "limits.index_entries"),
    "overflow": ({"overflows": 1, **MISSING}, "events= of the worker: this engine's own address"),
    "replaying": ({"resyncing": True, **MISSING}, None),
    "events-missed": (MISSING, "BUFFER"),
    "no-replay": ({"has_replay": False, "resyncing": True, **MISSING}, "REPLAY"),
    "refuted": ({"confidence": 0.9}, "events= of the worker: this engine's own address"),
    "masked-events": ({"skips": {"masked": 1}, **ALONE}, None),
    "groups-left-out": ({"leaves_out_groups": True}, None),
    "windows": ({"other_windows": 1}, None),
    "unknown-group": ({"skips": {"other_group": 1}}, None),
    "hybrid-tiers": (
        {"is_hybrid": True, "lower_tier_blocks": 1, "skips": {"other_group": 1}},
        None,
    ),
    "drafts-and-windows": ({"is_hybrid": True, "repeats_last_block": True}, None),
    "placeholders": (
        {"skips": {"unknown_names": 1}},
        '"self_describing_kv_events": true in the engine\'s kv_connector_extra_config',
    ),
    "events-unread": ({"skips": {"bad_tokens": 1}}, None),
    "tools-differ": (
        {"tokens": "tools"},
        "chat_template.jinja in the folder of --tokenizer: the engine's own",
    ),
    "beginning-alone": ({"tokens": "beginning"}, "limits.token_memo_bytes: 0"),
    "tokens-unchecked": ({"tokens": "unchecked"}, None),
    "last-block": ({"repeats_last_block": True}, None),
}
BY_NAME = {cause.name: cause for cause in CAUSES}


def test_every_cause_has_test_facts() -> None:
    assert list(FACTS) == [cause.name for cause in CAUSES]


@pytest.mark.parametrize("name", FACTS)
def test_facts_give_the_cause_with_its_mode_reason_and_remedy(name: str) -> None:
    facts, lift = FACTS[name]
    verdict = hit_verdict(HitFacts(**FLAGS, **facts))
    cause = BY_NAME[name]
    found = (verdict.cause, verdict.mode, verdict.reason, verdict.lift)
    assert found == (name, cause.mode, cause.reason, lift)


@pytest.mark.parametrize("name", [n for n in FACTS if BY_NAME[n].mode != "approximate"])
def test_a_cause_of_a_worse_mode_takes_precedence(name: str) -> None:
    facts = FACTS[name][0] | {"tokens": "none"}
    assert hit_verdict(HitFacts(**facts)).cause == "no-tokenizer"


def test_causes_are_ordered_from_the_worst_mode() -> None:
    modes = [cause.mode for cause in CAUSES]
    assert modes == sorted(modes)  # approximate, degraded, exact


def test_each_reason_is_one_plain_sentence() -> None:
    for cause in CAUSES:
        assert cause.reason.isascii()
        assert cause.reason.endswith(".")
        assert cause.reason.count(". ") == 0


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"skips": {"masked": 3}},  # told before its full group was known
        {"skips": {"token_count": 9, "other_block_size": 2}},  # unfinished blocks
        {"lower_tier_blocks": 4},
        {"overflows": 1, "forgotten_blocks": 1},  # and told anew since
        {"has_replay": False, **FLAGS},
    ],
)
def test_hits_are_exact_if_no_cause_applies(facts: dict[str, Any]) -> None:
    assert hit_verdict(HitFacts(**facts)) is EXACT


def test_the_operations_page_lists_the_same_causes() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("## How exact are expected hits?\n")[2].partition("\n## ")[0]
    lists = re.split(r"(?m)^\*\*`(exact|degraded|approximate)`\*\*: ", section)[1:]
    listed = [
        (cause, mode)
        for mode, text in zip(lists[::2], lists[1::2], strict=True)
        for cause in re.findall(r"(?m)^- `([a-z-]+)`: ", text)
    ]
    assert listed == [(cause.name, cause.mode) for cause in CAUSES]

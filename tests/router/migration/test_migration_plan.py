"""Tests of which streams may continue on another worker, and of the request that is then sent
there.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.server.bodies import DEFAULT_CHAT_TOKENS, DEFAULT_COMPLETION_TOKENS
from router.migration.journal import Room
from router.migration.plan import (
    COMPLETION_TOKENS,
    Plan,
    plan_of,
    rest_of,
    to_completions,
    tokens_left,
    with_return_token_ids,
)
from tests.router.migration.migration_support import FORMS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
}


def plan_or_reason(path: str, **fields: Any) -> Plan | str:
    body = json.dumps({**ASKED[path], "stream": True, **fields}).encode()
    return plan_of(body, path, fields.get("max_completion_tokens", fields.get("max_tokens")))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1, "best_of": 1, "stop": None, "logprobs": None, "tools": None},
        {"stop": [], "tools": [], "response_format": {"type": "text"}, "echo": False},
        {"temperature": 0.7, "top_p": 0.9, "seed": 3, "logit_bias": {"5": -1}, "ignore_eos": True},
        {"repetition_penalty": 1.1, "presence_penalty": 0.0, "frequency_penalty": 0},
        {"stop_token_ids": [3], "min_tokens": 2, "truncate_prompt_tokens": 4, "cache_salt": "s"},
        {"unknown": {"a": 1}, "tool_choice": "none"},
    ],
)
def test_a_stream_that_depends_only_on_its_tokens_may_move(
    path: str, fields: dict[str, Any]
) -> None:
    assert isinstance(plan_or_reason(path, **fields), Plan)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("stop", "end"),
        ("stop", ["end"]),
        ("prompt_logprobs", 0),
        ("echo", True),
        ("suffix", "x"),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("bad_words", ["x"]),
        ("use_beam_search", True),
        ("continue_final_message", True),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("max_tokens", 0),
    ],
)
def test_fields_that_need_the_first_half_prevent_a_move(path: str, name: str, value: Any) -> None:
    assert plan_or_reason(path, **{name: value}) == name


def test_log_probabilities_prevent_a_move() -> None:
    assert plan_or_reason(CHAT, logprobs=True) == "logprobs"
    assert isinstance(plan_or_reason(CHAT, logprobs=False, top_logprobs=0), Plan)
    assert plan_or_reason(COMPLETIONS, logprobs=0) == "logprobs"
    assert plan_or_reason(COMPLETIONS, logprobs=False) == "logprobs"


@pytest.mark.parametrize(
    ("prompt", "fits"),
    [
        ("a", True),
        ("[[1],[2]]", True),
        (["a"], True),
        ([1, 2], True),
        ([[1, 2]], True),
        (["a", "b"], False),
        ([[1], [2, 3]], False),
        (['a"],["', "b"], False),
    ],
)
def test_one_prompt_may_move_and_several_may_not(prompt: Any, fits: bool) -> None:
    found = plan_or_reason(COMPLETIONS, prompt=prompt)
    assert isinstance(found, Plan) if fits else found == "prompts"


def test_text_may_move_and_media_may_not() -> None:
    parts = [{"type": "text", "text": 'say "type": "image_url"'}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns.append({"role": "assistant", "content": None, "tool_calls": calls})
    assert isinstance(plan_or_reason(CHAT, messages=turns), Plan)
    parts.append({"type": "image_url", "image_url": {"url": "http://x"}})  # type: ignore[dict-item]
    assert plan_or_reason(CHAT, messages=turns) == "media"


def test_streams_of_other_paths_may_not_move() -> None:
    assert plan_of(b'{"stream":true}', "/v1/responses", None) == "path"


def migratable_plan(path: str, **fields: Any) -> Plan:
    found = plan_or_reason(path, **fields)
    assert isinstance(found, Plan), found
    return found


def test_the_request_for_token_ids_adds_one_field_and_changes_no_other() -> None:
    body = b' { "prompt" : "x",\n"stream":true, "odd": 1e2}'
    found = plan_of(body, COMPLETIONS, None)
    assert isinstance(found, Plan)
    assert with_return_token_ids(body, found) == body.replace(b"{", b'{"return_token_ids":true,')


@pytest.mark.parametrize("given", [False, None])
def test_token_ids_are_requested_even_if_the_client_declines_them(given: bool | None) -> None:
    body = json.dumps({"prompt": "x", "return_token_ids": given, "odd": [1]}).encode()
    found = plan_of(body, COMPLETIONS, None)
    assert isinstance(found, Plan)
    assert not found.shows_ids
    asked = json.loads(with_return_token_ids(body, found))
    assert asked == {"prompt": "x", "return_token_ids": True, "odd": [1]}


def test_the_rest_of_a_chat_is_requested_as_a_completion_of_its_token_ids() -> None:
    found = migratable_plan(
        CHAT,
        max_completion_tokens=10,
        max_tokens=7,
        min_tokens=5,
        temperature=0.5,
        logprobs=False,
        add_special_tokens=True,
        truncate_prompt_tokens=3,
        chat_template_kwargs={"a": 1},
        cache_salt="s",
        stream_options={"include_usage": True},
    )
    assert found.max_tokens == 10
    assert found.salt == "s"
    assert json.loads(rest_of(found, [1, 2, 3], 2, 8)) == {
        "prompt": [1, 2, 3],
        "max_tokens": 8,
        "min_tokens": 3,
        "temperature": 0.5,
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_min_tokens_is_0_once_it_is_reached() -> None:
    found = migratable_plan(COMPLETIONS, min_tokens=2)
    assert json.loads(rest_of(found, [1], 5, 8))["min_tokens"] == 0


def test_the_remaining_tokens_follow_from_limits_and_engine_defaults() -> None:
    ours, vllm = FORMS["warmroute"], FORMS["vllm"]
    assert tokens_left(migratable_plan(CHAT, max_tokens=9), vllm, 5, 4, None) == 5
    assert tokens_left(migratable_plan(COMPLETIONS), vllm, 5, 4, 100) == 12
    assert tokens_left(migratable_plan(CHAT), vllm, 5, 4, 100) == 91
    assert tokens_left(migratable_plan(CHAT), vllm, 5, 4, None) is None
    assert tokens_left(migratable_plan(CHAT), ours, 5, 4, None) == 252


def test_default_token_limits_equal_the_engines() -> None:
    assert COMPLETION_TOKENS == DEFAULT_COMPLETION_TOKENS
    assert FORMS["warmroute"].chat_tokens == DEFAULT_CHAT_TOKENS


def test_the_rest_goes_to_completions_under_the_same_base_path() -> None:
    assert to_completions("/a/v1/chat/completions?x=/chat/completions") == (
        "/a/v1/completions?x=/chat/completions"
    )
    assert to_completions("/v1/completions?y") == "/v1/completions?y"


def test_room_is_bounded_per_stream_and_in_total() -> None:
    room = Room(10, 15)
    assert room.take(10, 10)
    assert not room.take(1, 11)
    assert not room.take(6, 6)
    assert room.take(5, 5)
    assert not room.take(1, 6)
    room.give(10)
    assert room.taken == 5


def test_a_plan_tolerates_fields_of_unexpected_types() -> None:
    body = msgspec.json.encode({"prompt": "\u00fc" * 3, "stop": None, "stream_options": [1]})
    found = plan_of(body, COMPLETIONS, None)
    assert isinstance(found, Plan)
    assert not found.shows_usage

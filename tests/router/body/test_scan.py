"""Tests of the body reader: every form, every fault, and no exception other than ClientError."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.body.scan import ScanLimits, Scanned, scan
from router.http.errors import ClientError
from tests.router.property_support import patient

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}


def scanned(path: str = COMPLETIONS, **fields: Any) -> Scanned:
    return scan(json.dumps(fields).encode(), path)


def test_all_fields_that_the_router_needs_are_read() -> None:
    result = scanned(
        CHAT,
        model="m",
        stream=True,
        messages=[HI, {"role": "assistant", "content": None, "tool_calls": []}],
        session_id="s",
        cache_salt="salt",
        priority=-3,
        max_tokens=9,
        max_completion_tokens=7,
        n=2,
        tools=[{"type": "function"}],
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        unknown={"a": [1]},
    )
    assert result == Scanned(
        model="m",
        stream=True,
        messages=(HI, {"role": "assistant", "content": None, "tool_calls": []}),
        session="s",
        cache_salt="salt",
        priority=-3,
        max_output_tokens=7,
        choices=2,
    )
    options = result.options
    assert options.tools == [{"type": "function"}]
    assert options.chat_template_kwargs == {"enable_thinking": False}
    assert options.add_generation_prompt is False
    assert options.continue_final_message is True
    assert options.truncate_prompt_tokens is None


def test_null_counts_as_absent() -> None:
    names = ("model", "stream", "session_id", "user", "priority", "max_tokens", "n", "tools")
    result = scan(json.dumps({"prompt": "x"} | dict.fromkeys(names)).encode(), COMPLETIONS)
    assert result == Scanned(prompts=("x",))


@pytest.mark.parametrize(
    ("fields", "session", "agent_fields"),
    [
        ({"user": "u"}, None, {"user": "u"}),
        ({"user": "u", "prompt_cache_key": "k"}, None, {"user": "u", "prompt_cache_key": "k"}),
        ({"session_id": "s"}, "s", None),
        ({"session_id": "", "user": "", "metadata": None}, None, None),
        ({"metadata": {"a": [1]}, "nvext": 5}, None, {"metadata": b'{"a": [1]}', "nvext": b"5"}),
    ],
)
@pytest.mark.parametrize("text", ["x", "x" * 40_000])
def test_session_and_agent_fields_are_read_from_the_body(
    fields: dict[str, Any], session: str | None, agent_fields: dict[str, Any] | None, text: str
) -> None:
    found = scanned(prompt=text, **fields)
    assert (found.session, found.agent_fields) == (session, agent_fields)


def test_prompts_of_each_kind_are_read() -> None:
    assert scanned(prompt="text").prompts == ("text",)
    assert scanned(prompt=["a", "b"]).prompts == ("a", "b")
    (ids,) = scanned(prompt=[0, 1, 2**31 - 1]).prompts
    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 1, 2**31 - 1]
    (wide,) = scanned(prompt=[5, 2**31, 2**63 - 1]).prompts
    assert isinstance(wide, np.ndarray)
    assert (wide.dtype, wide.tolist()) == (np.int64, [5, 2**31, 2**63 - 1])
    lists = scanned(prompt=[[1, 2], [3]]).prompts
    assert [np.asarray(one).tolist() for one in lists] == [[1, 2], [3]]


def test_other_paths_need_neither_prompt_nor_messages() -> None:
    assert scan(b'{"model":"m","input":"x"}', "/v1/embeddings").model == "m"


def test_the_last_of_two_equal_keys_counts() -> None:
    assert scan(b'{"prompt":"a","prompt":"b"}', COMPLETIONS).prompts == ("b",)
    assert scan(b'{"prompt":"x","model":"a","\\u006dodel":"b"}', COMPLETIONS).model == "b"


def test_a_scanned_prompt_does_not_need_the_callers_bytes() -> None:
    prompt = "h\u00e9llo \U0001f600"
    assert scanned(prompt=prompt).prompts == (prompt,)


@pytest.mark.parametrize(
    ("body", "path", "param", "code", "words"),
    [
        (b"", COMPLETIONS, None, "invalid_json", "no body"),
        (b" \n ", COMPLETIONS, None, "invalid_json", "no body"),
        (b"[]", COMPLETIONS, None, "invalid_type", "expected object"),
        (b'{\n "prompt": "a" x}', COMPLETIONS, None, "invalid_json", "line 2, column 16"),
        (b'{"prompt": "a', COMPLETIONS, None, "invalid_json", "ends too early"),
        (b'{"prompt": "a"} {', COMPLETIONS, None, "invalid_json", "trailing characters"),
        (b'{"prompt": "\\ud800"}', COMPLETIONS, None, "invalid_json", "surrogate"),
        (b'{"prompt": "\xff"}', COMPLETIONS, "prompt", "invalid_json", "UTF-8"),
        (b"\xff\xfe{\x00}\x00", COMPLETIONS, None, "invalid_json", "byte 0"),
        (b'{"prompt": NaN}', COMPLETIONS, None, "invalid_json", "byte 11"),
        (b'{"a":' * 100_000, COMPLETIONS, None, "invalid_json", "too deeply"),
        (b'{"prompt":' + b"[" * 100_000, COMPLETIONS, None, "invalid_json", "too deeply"),
        (b'{"model": 5}', COMPLETIONS, "model", "invalid_type", "got integer"),
        (b'{"stream": "yes"}', COMPLETIONS, "stream", "invalid_type", "got string"),
        (b"{}", COMPLETIONS, "prompt", "missing_prompt", "needs a prompt"),
        (b'{"prompt": null}', COMPLETIONS, "prompt", "missing_prompt", "needs a prompt"),
        (b'{"prompt": ""}', COMPLETIONS, "prompt", "empty_prompt", "empty"),
        (b'{"prompt": []}', COMPLETIONS, "prompt", "empty_prompt", "empty"),
        (b'{"prompt": ["a", ""]}', COMPLETIONS, "prompt", "empty_prompt", "empty"),
        (b'{"prompt": [[1], []]}', COMPLETIONS, "prompt", "empty_prompt", "empty"),
        (b'{"prompt": {"a": 1}}', COMPLETIONS, "prompt", "invalid_type", "got object"),
        (b'{"prompt": 5}', COMPLETIONS, "prompt", "invalid_type", "got integer"),
        (b'{"prompt": [1, "a"]}', COMPLETIONS, "prompt[1]", "invalid_type", "got string"),
        (b'{"prompt": [1, true]}', COMPLETIONS, "prompt[1]", "invalid_type", "got boolean"),
        (b'{"prompt": [1, 1.5]}', COMPLETIONS, "prompt[1]", "invalid_type", "got number"),
        (b'{"prompt": ["a", [1]]}', COMPLETIONS, "prompt", "invalid_type", "mixed"),
        (b'{"prompt": [-1]}', COMPLETIONS, "prompt", "integer_out_of_range", "token id"),
        (
            b'{"prompt": [9223372036854775808]}',
            COMPLETIONS,
            "prompt",
            "integer_out_of_range",
            "0..9223372036854775807",
        ),
        (b'{"prompt": [[1],[1e30]]}', COMPLETIONS, "prompt[1][0]", "invalid_type", "number"),
        (
            b'{"prompt": [[1],[99999999999999999999999]]}',
            COMPLETIONS,
            "prompt[1]",
            "integer_out_of_range",
            "token id",
        ),
        (b'{"prompt": [' + b"9" * 6000 + b"]}", COMPLETIONS, "prompt[0]", "invalid_type", "range"),
        (b'{"prompt": "a", "n": 0}', COMPLETIONS, "n", "integer_out_of_range", "1..128"),
        (b'{"prompt": "a", "n": 129}', COMPLETIONS, "n", "integer_out_of_range", "1..128"),
        (b'{"prompt": "a", "max_tokens": -1}', COMPLETIONS, "max_tokens", "invalid_type", ">= 0"),
        (b'{"prompt": "a", "priority": 2147483648}', COMPLETIONS, "priority", "invalid_type", "<="),
        (b"{}", CHAT, "messages", "empty_messages", "at least one"),
        (b'{"messages": []}', CHAT, "messages", "empty_messages", "at least one"),
        (b'{"messages": {}}', CHAT, "messages", "invalid_type", "got object"),
        (b'{"messages": [3]}', CHAT, "messages[0]", "invalid_type", "got integer"),
        (b'{"messages": [{}]}', CHAT, "messages[0].role", "invalid_type", "role"),
        (
            b'{"messages": [{"role": "user", "content": 5}]}',
            CHAT,
            "messages[0].content",
            "invalid_type",
            "content must be",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            CHAT,
            "messages[0].content[0].text",
            "invalid_type",
            "text",
        ),
        (
            b'{"messages": [{"role": "user", "content": [5]}]}',
            CHAT,
            "messages[0].content[0].type",
            "invalid_type",
            "type",
        ),
    ],
)
def test_an_error_has_the_parameter_code_and_reason(
    body: bytes, path: str, param: str | None, code: str, words: str
) -> None:
    with pytest.raises(ClientError) as caught:
        scan(body, path)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, code), error.message
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": [HI] * 4}, "messages", "array_too_long"),
        ({"prompt": ["a"] * 3}, "prompt", "array_too_long"),
        ({"prompt": "a", "n": 6}, "n", "integer_out_of_range"),
        ({"prompt": "a", "user": "u" * 9}, "user", "string_too_long"),
        ({"prompt": "a", "cache_salt": "u" * 9}, "cache_salt", "string_too_long"),
    ],
)
def test_limits_are_configurable(fields: dict[str, Any], param: str, code: str) -> None:
    limits = ScanLimits(max_messages=3, max_prompts=2, max_choices=5, max_key_chars=8)
    with pytest.raises(ClientError) as caught:
        scan(json.dumps(fields).encode(), COMPLETIONS, limits)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("path", "field", "name"),
    [
        (CHAT, "mesages", "messages"),
        (CHAT, "Message", "messages"),
        (COMPLETIONS, "promt", "prompt"),
    ],
)
def test_the_error_suggests_the_name_for_a_misspelt_field(path: str, field: str, name: str) -> None:
    with pytest.raises(ClientError) as caught:
        scanned(path, model="m", **{field: [HI]})
    assert caught.value.message.endswith(f"; the body has `{field}`: did you mean `{name}`?")
    assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize("field", ["wages", "message s", "messagés", "message" * 9, "m" * 40_000])
def test_a_field_unlike_the_missing_one_is_not_suggested(field: str) -> None:
    with pytest.raises(ClientError) as caught:
        scanned(CHAT, **{field: [HI]})
    assert caught.value.message == "a chat needs at least one message"


def test_ten_thousand_messages_are_refused_by_count() -> None:
    with pytest.raises(ClientError, match="10000 messages are more than the 4096 allowed"):
        scanned(CHAT, messages=[HI] * 10_000)


def test_error_messages_do_not_contain_the_prompt() -> None:
    for body in (
        b'{"prompt": "sesame" oops',
        b'{"prompt": {"sesame": 1}}',
        b'{"model": ["sesame"]}',
    ):
        with pytest.raises(ClientError) as caught:
            scan(body, COMPLETIONS)
        assert b"sesame" not in caught.value.body()


KEYS = st.sampled_from(
    ["model", "prompt", "messages", "role", "content", "type", "text", "n", "stream", "tools"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@patient
@given(st.binary(max_size=200), st.sampled_from([COMPLETIONS, CHAT, "/tokenize"]))
@example(b'{"prompt":[,]}', COMPLETIONS)
def test_any_bytes_are_scanned_or_refused(body: bytes, path: str) -> None:
    check_outcome(body, path)


@patient
@given(st.dictionaries(KEYS, JSON, max_size=5), st.data())
def test_corrupted_json_is_scanned_or_refused(fields: dict[str, Any], data: st.DataObject) -> None:
    body = bytearray(json.dumps(fields).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    check_outcome(bytes(body), data.draw(st.sampled_from([COMPLETIONS, CHAT, "/tokenize"])))


def check_outcome(body: bytes, path: str) -> None:
    """Check that a body gives either a valid Scanned or a ClientError that can be sent."""
    try:
        result = scan(body, path)
    except ClientError as error:
        refusal = json.loads(error.body())
        assert refusal["error"]["message"]
        return
    for prompt in result.prompts:
        assert len(prompt)
        if isinstance(prompt, str):
            prompt.encode()
        else:
            assert prompt.dtype == (np.int64 if prompt.max() >= 2**31 else np.int32)
            assert prompt.min() >= 0
    assert all(isinstance(message["role"], str) for message in result.messages)

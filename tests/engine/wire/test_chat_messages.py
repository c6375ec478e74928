"""Tests of the changes to messages, tools and variables before a template is rendered, which equal
those of vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from engine.wire.hf import HfTokenizer
from engine.wire.template import (
    ChatTemplate,
    declared,
    developer_as_system,
    loops_over_content,
    prepared,
)
from engine.wire.tokens import Chat, PromptError

NOW_S = 1_700_000_000.0
FIRST = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("source", "loops"),
    [
        ("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}", True),
        ("{% set ms = messages[1:] %}{% for m in ms %}{% for p in m.content %}{% endfor %}"
         "{% endfor %}", True),
        ("{% for m in messages %}{% set x = m %}{% for p in x.content %}{% endfor %}"
         "{% endfor %}", True),
        ("{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.content) }}{% endfor %}", True),
        ("{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(c=m['content']) }}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}"
         "{% endfor %}", True),
        ("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}", False),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}"
         "{% endfor %}", False),
        ("{% for t in tools %}{% for p in t.content %}{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
    ],
)  # fmt: skip
def test_templates_that_loop_over_content_get_parts(source: str, loops: bool) -> None:
    assert loops_over_content(jinja2.Environment().parse(source)) is loops


def test_the_content_format_can_be_configured() -> None:
    chat = Chat(messages=[{"role": "user", "content": "ab"}])
    assert ChatTemplate(FIRST, {}, "openai").render(chat, NOW_S) == str(
        [{"type": "text", "text": "ab"}]
    )
    loops = "{% for m in messages %}{% for p in m.content %}[{{ p }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(loops, {}, "string").render(chat, NOW_S) == "[a][b]"


@pytest.mark.parametrize(
    ("message", "ready"),
    [
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {"role": "user", "content": ["a", {"type": "text", "text": ""}, "b"], "x": 1},
            {"role": "user", "content": "a\nb"},
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [], "name": "n"},
            {"role": "assistant", "content": "a", "name": "n"},
        ),
        (
            {"role": "user", "content": "a", "tool_calls": [1], "tool_call_id": "1", "name": 5},
            {"role": "user", "content": "a"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "r"},
            {
                "role": "assistant",
                "content": "a",
                "reasoning": "r",
                "reasoning_content": "r",
                "thinking": "r",
            },
        ),
        (
            {"role": "tool", "content": None, "tool_call_id": "1"},
            {"role": "tool", "content": "", "tool_call_id": "1"},
        ),
        (
            {"role": "developer", "content": "a", "tools": [1]},
            {"role": "developer", "content": "a", "tools": [1]},
        ),
    ],
)
def test_messages_keep_only_fields_that_servers_know(
    message: dict[str, Any], ready: dict[str, Any]
) -> None:
    assert prepared([message], wants_parts=False) == [ready]


def test_with_content_parts_only_tool_results_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": role, "content": parts} for role in ("user", "tool")]
    user, tool = prepared(messages, wants_parts=True)
    assert user["content"] == parts
    assert tool["content"] == "a\nb"
    assert prepared([{"role": "user"}], wants_parts=True)[0]["content"] == []


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{", {}),
        ("[1]", {}),
        ("\ud800", {}),
        ("[" * 100_000, {}),
        (7, {}),
    ],
)
def test_tool_call_arguments_always_become_objects(given: Any, parsed: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": given}}
    (ready,) = prepared([{"role": "assistant", "tool_calls": [call]}], wants_parts=False)
    assert ready["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": parsed}}]
    assert call["function"] == {"name": "f", "arguments": given}  # left as it was


def test_developer_messages_become_one_leading_system_message() -> None:
    def of(*roles: str) -> list[dict[str, Any]]:
        return [{"role": role, "content": role[0], "tools": 1} for role in roles]

    assert developer_as_system(of("user", "system")) == of("user", "system")
    assert developer_as_system(of("developer", "user")) == [
        {"role": "system", "content": "d"},
        *of("user"),
    ]
    merged = {"role": "system", "content": "s\n\nd"}
    assert developer_as_system(of("system", "user", "developer")) == [merged, *of("user")]


def test_tools_are_declared_in_fixed_order_without_keys_unknown_to_vllm() -> None:
    assert declared(None) is None
    assert declared([]) == []
    (tool,) = (
        declared([{"x": 1, "function": {"x": 1, "parameters": {"b": 1, "a": 2}, "name": "f"}}])
        or []
    )
    assert json.dumps(tool) == (
        '{"type": "function", "function": '
        '{"name": "f", "description": null, "parameters": {"b": 1, "a": 2}}}'
    )
    assert declared([5, {"type": "web"}]) == [5, {"type": "web"}]


def test_strict_and_defer_loading_are_declared_where_they_are_set() -> None:
    function = {"defer_loading": None, "strict": False, "name": "f"}
    (tool,) = declared([{"defer_loading": True, "function": function}]) or []
    assert json.dumps(tool) == (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": null, '
        '"strict": false, "defer_loading": true}, "defer_loading": true}'
    )
    (tool,) = declared([{"function": {"defer_loading": False, "strict": None, "name": "f"}}]) or []
    assert json.dumps(tool) == (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": null, '
        '"defer_loading": false}}'
    )


def test_a_template_sees_defaults_kwargs_and_special_tokens() -> None:
    source = "{{ a }}{{ b }}{{ bos_token }}{{ reasoning_effort }}{{ enable_thinking }}"
    defaults = {"a": 1, "b": 2}

    def render(**fields: Any) -> str:
        chat = Chat(messages=[{"role": "user"}], **fields)
        return ChatTemplate(source, {"bos_token": "<s>"}, defaults=defaults).render(chat, NOW_S)

    assert render() == "12<s>"
    assert render(chat_template_kwargs={"b": 3, "a": None}) == "13<s>"
    assert render(chat_template_kwargs={"bos_token": ""}) == "12"
    assert render(reasoning_effort="none") == "12<s>noneFalse"
    assert render(reasoning_effort="low") == "12<s>lowTrue"
    kwargs = {"enable_thinking": "?", "reasoning_effort": "high"}
    assert render(chat_template_kwargs=kwargs) == "12<s>high?"
    assert render(chat_template_kwargs=kwargs, reasoning_effort="low") == "12<s>low?"
    with pytest.raises(PromptError, match="chat_template"):
        render(chat_template_kwargs={"chat_template": "x"})


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (FIRST + "</s>", "well ", "well "),
        ("{{ messages[0].content | trim }}</s>", "well ", "well"),
        ("{{ messages[0].content }}{{ messages[0].content }}!", "a", "aCUT"),
        ("{{ messages[0].content.split('</think>')[-1] }}!", "x</think> y", " y"),
    ],
)
def test_a_continued_message_ends_the_prompt(source: str, content: str, text: str) -> None:
    chat = Chat(
        messages=[{"role": "assistant", "content": content}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    if text == "aCUT":  # shown twice: the last one counts, and the first one keeps the mark
        assert ChatTemplate(source, {}).render(chat, NOW_S).endswith(" a")
    elif "think" in source:  # the template changes the message
        with pytest.raises(PromptError, match="continue_final_message"):
            ChatTemplate(source, {}).render(chat, NOW_S)
    else:
        assert ChatTemplate(source, {}).render(chat, NOW_S) == text
    for unfit in ("{{ messages | length }}", "nothing of content"):
        with pytest.raises(PromptError, match="continue_final_message"):
            ChatTemplate(unfit, {}).render(chat, NOW_S)


def test_even_an_empty_tool_list_selects_the_tool_template(model: Path) -> None:
    ours = HfTokenizer(model)
    messages = [{"role": "user", "content": "ab"}]
    assert ours.render(Chat(messages=messages, tools=[]), NOW_S) == "T"
    assert ours.render(Chat(messages=messages), NOW_S) == "<s>Dab"

"""Chats become the text and the ids that transformers and vLLM make of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jinja2
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire import PromptError
from engine.wire.content_shape import loops_over_content
from engine.wire.hf import HfTokenizer
from engine.wire.memo import MemoEncoder
from engine.wire.messages import declared, developer_as_system, prepared
from engine.wire.template import ChatTemplate
from engine.wire.tokens import Chat
from tests.effort import EFFORT
from tests.engine.model_dirs import KINDS, ORDINARY, SPECIAL, TEMPLATES, write_model

NOW_S = 1_700_000_000.0
FIRST = "{{ messages[0].content }}"


@cache
def pair(kind: str, template: str, *config: tuple[str, Any]) -> tuple[HfTokenizer, Any]:
    """Our tokenizer and transformers' own, of the same directory."""
    with TemporaryDirectory() as folder:
        directory = write_model(Path(folder), kind, template, **dict(config))
        theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
        return HfTokenizer(directory), theirs


# --- the same as transformers --------------------------------------------------------------

pieces = st.sampled_from([*SPECIAL, *ORDINARY, "the dog", " ", "\n", "  x ", "{{ x }}", "<b>&'"])
texts = st.lists(pieces | st.text("aé京 \n", max_size=6), max_size=6).map("".join)
arguments = st.dictionaries(
    st.text("ab", min_size=1, max_size=3), texts | st.integers(), max_size=2
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages as clients send them; roles in the order that the strict templates allow."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 4))):
        parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3)
        messages.append({"role": "user", "content": draw(texts | parts)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(texts | st.none())}
        if draw(st.booleans()):
            call = {"name": "look", "arguments": json.dumps(draw(arguments))}
            answer["tool_calls"] = [{"id": "1", "type": "function", "function": call}]
            messages += [answer, {"role": "tool", "tool_call_id": "1", "content": draw(texts)}]
        else:
            if draw(st.booleans()):
                answer["reasoning_content"] = draw(texts)
            messages.append(answer)
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(texts)})
    return messages


tools = (
    st.none()
    | st.just([])
    | st.just(
        [{"function": {"parameters": {"type": "object"}, "name": "look"}, "type": "function"}]
    )
)
kwargs = st.fixed_dictionaries({}, optional={"enable_thinking": st.booleans(), "unused": texts})


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@settings(max_examples=30 * EFFORT, deadline=None)
@given(st.sampled_from(KINDS), conversations(), tools, kwargs, st.booleans())
def test_text_and_ids_equal_those_of_transformers(
    template: str,
    kind: str,
    messages: list[dict[str, Any]],
    given_tools: Any,
    template_kwargs: dict[str, Any],
    prompted: bool,
) -> None:
    ours, theirs = pair(kind, template)
    chat = Chat(
        messages=messages,
        tools=given_tools,
        add_generation_prompt=prompted,
        continue_final_message=not prompted and messages[-1]["role"] == "assistant",
        chat_template_kwargs=template_kwargs,
    )
    expected: Any
    shaped = prepared(messages, wants_parts=template == "parts")
    try:
        expected = theirs.apply_chat_template(
            shaped,
            tools=declared(given_tools),
            add_generation_prompt=prompted,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **template_kwargs,
        )
    except (ValueError, jinja2.TemplateError):
        with pytest.raises(PromptError):
            ours.render(chat, NOW_S)
        return
    assert ours.render(chat, NOW_S) == expected
    ids = theirs(expected, add_special_tokens=False)["input_ids"]
    assert ours.encode_chat(chat, NOW_S) == ids
    assert MemoEncoder(ours, ours, 1 << 20).encode_chat(chat, NOW_S).tolist() == ids


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"unk_token": "the", "pad_token": {"__type": "AddedToken", "content": "dog"}},
        {
            "added_tokens_decoder": {
                "9000": {"content": "brown", "special": False, "single_word": True},
                "9001": {"content": "<|im_end|>", "rstrip": True, "special": True},
            }
        },
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "metaspace-first", "unigram"])
def test_the_configuration_completes_a_tokenizer_as_in_transformers(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, kind, **config)
    ours = HfTokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    memo = MemoEncoder(ours, ours, 1 << 20)
    for text in ("the quick brown dog", "brownie <|im_end|>  the <s>dog</s>", "", "<think>"):
        for special in (True, False):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special) == expected
            assert memo.encode(text, special).tolist() == expected


def test_limits_of_a_training_run_in_the_file_cut_nothing(tmp_path: Path) -> None:
    write_model(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert len(HfTokenizer(tmp_path).encode("the quick brown fox jumps")) > 4


@pytest.mark.parametrize("listed", [{"x": {"content": "a"}}, {"1": {}}, {"1": 5}])
def test_a_broken_list_of_tokens_is_named(listed: Any, tmp_path: Path) -> None:
    write_model(tmp_path, added_tokens_decoder=listed)
    with pytest.raises(ValueError, match="added_tokens_decoder"):
        HfTokenizer(tmp_path)


# --- what vLLM does before -----------------------------------------------------------------


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


def test_the_shape_of_content_can_be_forced() -> None:
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
def test_messages_keep_what_servers_know(message: dict[str, Any], ready: dict[str, Any]) -> None:
    assert prepared([message], wants_parts=False) == [ready]


def test_with_parts_only_tool_results_are_one_text() -> None:
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
def test_arguments_of_calls_are_objects_whatever_came(given: Any, parsed: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": given}}
    (ready,) = prepared([{"role": "assistant", "tool_calls": [call]}], wants_parts=False)
    assert ready["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": parsed}}]
    assert call["function"] == {"name": "f", "arguments": given}  # left as it was


def test_developers_become_one_system_message_at_the_top() -> None:
    def of(*roles: str) -> list[dict[str, Any]]:
        return [{"role": role, "content": role[0], "tools": 1} for role in roles]

    assert developer_as_system(of("user", "system")) == of("user", "system")
    assert developer_as_system(of("developer", "user")) == [
        {"role": "system", "content": "d"},
        *of("user"),
    ]
    merged = {"role": "system", "content": "s\n\nd"}
    assert developer_as_system(of("system", "user", "developer")) == [merged, *of("user")]


def test_tools_are_declared_in_one_order_with_nothing_left_out() -> None:
    assert declared(None) is None
    assert declared([]) == []
    (tool,) = declared([{"strict": 1, "function": {"x": 1, "parameters": {}, "name": "f"}}]) or []
    assert json.dumps(tool) == (
        '{"type": "function", "function": '
        '{"name": "f", "description": null, "parameters": {}, "x": 1}}'
    )
    assert declared([5, {"type": "web"}]) == [5, {"type": "web"}]


def test_which_variables_a_template_sees() -> None:
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


def test_tools_choose_the_template_made_for_them_even_when_none_is_given(model: Path) -> None:
    ours = HfTokenizer(model)
    messages = [{"role": "user", "content": "ab"}]
    assert ours.render(Chat(messages=messages, tools=[]), NOW_S) == "T"
    assert ours.render(Chat(messages=messages), NOW_S) == "<s>Dab"

"""Tests that chats become the same text and token ids as in transformers."""

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

from engine.wire.hf import HfTokenizer
from engine.wire.memo import MemoEncoder
from engine.wire.template import declared, prepared
from engine.wire.tokens import Chat, PromptError
from tests.effort import examples
from tests.engine.model_dirs import KINDS, ORDINARY, SPECIAL, TEMPLATES, write_model

NOW_S = 1_700_000_000.0


@cache
def pair(kind: str, template: str, *config: tuple[str, Any]) -> tuple[HfTokenizer, Any]:
    """Return our tokenizer and transformers' own, for the same directory."""
    with TemporaryDirectory() as folder:
        directory = write_model(Path(folder), kind, template, **dict(config))
        theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
        return HfTokenizer(directory), theirs


pieces = st.sampled_from([*SPECIAL, *ORDINARY, "the dog", " ", "\n", "  x ", "{{ x }}", "<b>&'"])
texts = st.lists(pieces | st.text("aé京 \n", max_size=6), max_size=6).map("".join)
arguments = st.dictionaries(
    st.text("ab", min_size=1, max_size=3), texts | st.integers(), max_size=2
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw messages as clients send them, with roles in the order that the strict
    templates allow.
    """
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
@settings(max_examples=examples(30), deadline=None)
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
        {"additional_special_tokens": ["brown", "<|im_end|>", "<new>"]},
        {"extra_special_tokens": ["quick"]},
        {"mask_token": {"__type": "AddedToken", "content": "dog", "lstrip": True}},
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
def test_the_tokenizer_configuration_applies_as_in_transformers(
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


def test_truncation_in_the_tokenizer_file_is_ignored(tmp_path: Path) -> None:
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
def test_the_error_names_a_broken_list_of_added_tokens(listed: Any, tmp_path: Path) -> None:
    write_model(tmp_path, added_tokens_decoder=listed)
    with pytest.raises(ValueError, match="added_tokens_decoder"):
        HfTokenizer(tmp_path)

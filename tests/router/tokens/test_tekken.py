"""Tests of prompts for Mistral's models: ids equal those of mistral-common, whatever the memo
holds.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from engine.wire.memo import PieceMemo
from engine.wire.tokens import Chat, PromptError
from router.tokens.tekken import TekkenEncoder
from tests.router.tokens.chats import TEKKEN_FILE, TOOLS, chats

FILE = TEKKEN_FILE
LARGE = 1 << 24
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}


@pytest.fixture(scope="module")
def made() -> TekkenEncoder:
    return TekkenEncoder(FILE, PieceMemo(LARGE))


@pytest.fixture(scope="module")
def package() -> MistralTokenizer:
    return MistralTokenizer.from_file(FILE, mode=ValidationMode.test)


def by_package(package: MistralTokenizer, chat: Chat) -> list[int]:
    """Return the ids that mistral-common makes of the chat, with call ids shortened to their last
    nine characters.
    """
    messages = json.loads(json.dumps(chat.messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"][-9:]
        if "tool_call_id" in message:
            message["tool_call_id"] = message["tool_call_id"][-9:]
    request: Any = ChatCompletionRequest.from_openai(
        messages, chat.tools, continue_final_message=chat.continue_final_message
    )
    ids: list[int] = package.encode_chat_completion(request).tokens
    return ids


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0, LARGE, 20_000]))
def test_chats_are_rendered_as_by_the_package(
    made: TekkenEncoder, package: MistralTokenizer, seed: int, max_bytes: int
) -> None:
    made._memo = PieceMemo(max_bytes)
    for chat in chats(random.Random(seed), 4, thinks=False):
        expected = by_package(package, chat)
        assert made.encode_chat(chat, 0.0).tolist() == expected
        assert made.encode_chat(chat, 0.0, "salt").tolist() == expected
        assert made._memo.bytes <= max_bytes


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.booleans())
def test_plain_prompts_are_encoded_as_by_the_package(
    made: TekkenEncoder, package: MistralTokenizer, text: str, special: bool
) -> None:
    plain: Any = package.instruct_tokenizer.tokenizer
    whole = ("a b\n" + text) * 300
    for one in (text, whole):
        assert made.encode(one, special).tolist() == plain.encode(one, bos=special, eos=False)


@pytest.mark.parametrize("version", ["v7", "v11", "v13"])
def test_newer_tokenizer_versions_are_encoded_by_the_package(version: str, tmp_path: Path) -> None:
    vocabulary = json.loads(FILE.read_bytes())
    vocabulary["config"]["version"] = version
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    names += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"]
    names += ["[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"]
    names += ["[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
    vocabulary["special_tokens"] = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
    ]
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(vocabulary))
    made, package = TekkenEncoder(path, PieceMemo(LARGE)), MistralTokenizer.from_file(path)
    for chat in chats(random.Random(5), 6, thinks=False):
        assert made.encode_chat(chat, 0.0).tolist() == by_package(package, chat)


def test_keys_that_vllm_drops_do_not_change_the_tokens(made: TekkenEncoder) -> None:
    more = [{**tool, "x": 1, "function": tool["function"] | {"y": 2}} for tool in TOOLS]
    answer = ANSWER | {"refusal": None, "annotations": [], "tool_calls": None}
    said = [USER | {"cache_control": {"type": "ephemeral"}}, answer, USER]
    plain = made.encode_chat(Chat(messages=[USER, ANSWER, USER], tools=TOOLS), 0.0)
    assert made.encode_chat(Chat(messages=said, tools=more), 0.0).tolist() == plain.tolist()


def test_a_final_assistant_message_can_be_continued(
    made: TekkenEncoder, package: MistralTokenizer
) -> None:
    chat = Chat(messages=[USER, ANSWER], continue_final_message=True, add_generation_prompt=False)
    ids = made.encode_chat(chat, 0.0).tolist()
    assert ids == by_package(package, chat)
    plain: Any = package.instruct_tokenizer.tokenizer
    assert ids[-1] != plain.eos_id


def test_the_next_turn_encodes_only_its_own_text(made: TekkenEncoder) -> None:
    memo = made._memo = PieceMemo(LARGE)
    messages: list[dict[str, Any]] = []
    for number in range(8):
        before = memo.encoded_chars
        asked = f"{number} " + "what of it? " * 1_000
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": "Yes."}]
        made.encode_chat(Chat(messages=messages[:-1]), 0.0)
        if number:
            assert memo.encoded_chars - before < 1.1 * len(asked)


@pytest.mark.parametrize(
    "chat",
    [
        Chat(messages=[]),
        Chat(messages=[USER, ANSWER]),
        Chat(messages=[USER], continue_final_message=True, add_generation_prompt=False),
        Chat(messages=[USER], chat_template_kwargs={}),
        Chat(messages=[USER], reasoning_effort="odd"),
        Chat(messages=[{"role": "critic", "content": "x"}]),
        Chat(messages=[{"role": "user", "content": "\ud800"}]),
        Chat(messages=[{"role": "user", "content": 5}]),
        Chat(messages=[USER, {"role": "assistant", "tool_calls": [5]}]),
        Chat(messages=[USER, {"role": "tool", "tool_call_id": 5, "content": "x"}]),
        Chat(messages=[USER, ANSWER, {"role": "system", "content": "later"}]),
        Chat(messages=[USER], tools=[{"type": "function"}]),
        Chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        Chat(messages=[{"role": "user", "content": [{"text": "x"}]}]),
    ],
)
def test_chats_that_vllm_refuses_are_refused(made: TekkenEncoder, chat: Chat) -> None:
    with pytest.raises(PromptError):
        made.encode_chat(chat, 0.0)


def test_long_prompts_are_refused(package: MistralTokenizer) -> None:
    made = TekkenEncoder(FILE, PieceMemo(0), max_chars=10)
    for asked in (lambda: made.encode("x" * 11), lambda: made.encode_chat(long_chat(), 0.0)):
        with pytest.raises(PromptError, match="more than 10 characters"):
            asked()


def long_chat() -> Chat:
    return Chat(messages=[{"role": "user", "content": "x" * 11}], tools=TOOLS)


def test_the_error_contains_the_unparsable_file(tmp_path: Path) -> None:
    path = tmp_path / "tekken.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tekken\.json"):
        TekkenEncoder(path, PieceMemo(0))

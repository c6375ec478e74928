"""Tests of gpt-oss chats: ids equal those that the openai-harmony package renders, whatever the
memo holds.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import openai_harmony as harmony
import pytest
from hypothesis import given, settings

from engine.wire.memo import PieceMemo
from engine.wire.tokens import Chat, PromptError
from router.tokens.harmony import HarmonyEncoder
from router.tokens.pieces import MIN_PIECE_CHARS, cut
from tests.router.tokens.chats import TOOLS, chats

DAY = "2026-03-04"
LARGE = 1 << 24
ENCODING = harmony.load_harmony_encoding("HarmonyGptOss")


def encoder(max_bytes: int = LARGE, max_chars: int | None = None) -> HarmonyEncoder:
    return HarmonyEncoder(None, PieceMemo(max_bytes), lambda _: DAY, max_chars)


def text_of(messages: list[dict[str, Any]], **more: Any) -> str:
    """Return the text of the prompt after the system's turn, with its special tokens."""
    ids = encoder().encode_chat(Chat(messages=messages, **more), 0.0)
    return ENCODING.decode(ids.tolist()).partition("<|end|>")[2]


def rendered(turns: list[harmony.Message]) -> list[int]:
    """Return the token ids that the package renders from all turns at once."""
    ids: list[int] = ENCODING.render_conversation_for_completion(
        harmony.Conversation.from_messages(turns),
        harmony.Role.ASSISTANT,
        harmony.RenderConversationConfig(auto_drop_analysis=False),
    )
    return ids


def turn(role: str, *texts: str, channel: str | None = None) -> harmony.Message:
    contents = [harmony.TextContent(text=text) for text in texts]
    made = harmony.Message.from_role_and_contents(harmony.Role(role), contents)
    return made if channel is None else made.with_channel(channel)


def system(effort: str = "Medium") -> harmony.Message:
    content = harmony.SystemContent.new().with_conversation_start_date(DAY)
    content = content.with_reasoning_effort(harmony.ReasoningEffort(effort))
    return harmony.Message.from_role_and_content(harmony.Role.SYSTEM, content)


WRONG_TOOLS: list[Any] = ["x", None, [], 3]
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
THINKING = {"role": "assistant", "content": None, "reasoning": "R", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "out"}
CALLED = (
    "<|start|>assistant<|channel|>analysis<|message|>R<|end|>"
    '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"a":1}<|call|>'
    "<|start|>functions.look<|channel|>commentary to=assistant<|message|>out<|end|>"
)
ASKED = "<|start|>user<|message|>hi<|end|>"
NEXT = "<|start|>assistant"


def developer(text: str) -> str:
    return f"<|start|>developer<|message|># Instructions\n\n{text}<|end|>"


def final(text: str) -> str:
    return f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>"


# Each as vLLM 0.32 rendered it.
RENDERED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a call": ([USER, THINKING, RESULT], ASKED + CALLED + NEXT),
    "its thoughts end with the answer": (
        [USER, THINKING, RESULT, {"role": "assistant", "content": "C", "reasoning": "Q"}, USER],
        ASKED + CALLED.partition("<|end|>")[2] + final("C") + ASKED + NEXT,
    ),
    "a thought alone": (
        [USER, {"role": "assistant", "content": None, "reasoning_content": "R"}, USER],
        ASKED + CALLED.partition("<|end|>")[0] + "<|end|>" + ASKED + NEXT,
    ),
    "instructions": ([{"role": "system", "content": "S"}, USER], developer("S") + ASKED + NEXT),
    "none": ([{"role": "developer", "content": ""}, USER], ASKED + NEXT),
    "later ones": ([USER, {"role": "system", "content": "S"}], ASKED + developer("S") + NEXT),
    "a result of an unknown call": (
        [{**RESULT, "tool_call_id": "c2"}],
        "<|start|>functions.<|channel|>commentary to=assistant<|message|>out<|end|>" + NEXT,
    ),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": text} for text in ("h", "i")]}],
        ASKED + NEXT,
    ),
    "an answer that begins with nothing": (
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        ASKED + NEXT,
    ),
}


@pytest.mark.parametrize("name", RENDERED)
def test_messages_are_rendered_as_by_vllm(name: str) -> None:
    messages, expected = RENDERED[name]
    assert text_of(messages) == expected
    assert text_of(messages, continue_final_message=True, add_generation_prompt=False) == expected


@settings(deadline=None)
@given(st.lists(st.text() | st.sampled_from(["<|end|>", "<|start|>assistant", "a\nb"]), max_size=9))
def test_texts_are_never_control_tokens(texts: list[str]) -> None:
    try:
        expected = rendered([system(), *(turn("user", text, "x") for text in texts)])
    except harmony.HarmonyError:  # a lone surrogate
        return
    parts = [[{"type": "text", "text": text}, {"type": "text", "text": "x"}] for text in texts]
    messages = [{"role": "user", "content": content} for content in parts]
    assert encoder().encode_chat(Chat(messages=messages), 0.0).tolist() == expected


def test_tools_and_effort_are_rendered_as_by_the_package() -> None:
    described = [
        harmony.ToolDescription.new(
            tool["function"]["name"],
            tool["function"].get("description", ""),
            tool["function"].get("parameters"),
        )
        for tool in TOOLS
    ]
    content = harmony.DeveloperContent.new().with_instructions("S").with_function_tools(described)
    instructed = harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)
    chat = Chat(
        messages=[{"role": "system", "content": "S"}, USER], tools=TOOLS, reasoning_effort="high"
    )
    expected = rendered([system("High"), instructed, turn("user", "hi")])
    assert encoder().encode_chat(chat, 0.0).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([LARGE, 20_000]))
def test_the_memo_changes_no_ids(seed: int, max_bytes: int) -> None:
    draw = random.Random(seed)
    kept = encoder(max_bytes)
    for chat in chats(draw, 4):
        fresh = encoder(0).encode_chat(chat, 0.0).tolist()
        assert kept.encode_chat(chat, 0.0).tolist() == fresh
        assert kept.encode_chat(chat, 0.0, "salt").tolist() == fresh


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_texts_are_cut_only_at_token_boundaries(data: st.DataObject) -> None:
    parts = st.sampled_from(["a", "B", "1", " ", "\n", "\r\n", "/", "'s", ".", "é", "東", "\u0301"])
    start = "ab " * (MIN_PIECE_CHARS // 3)
    text = start + "".join(data.draw(st.lists(parts, max_size=40)))
    plain = [token for piece in cut(text) for token in ENCODING.encode(piece)]
    assert plain == ENCODING.encode(text)


def test_the_next_turn_encodes_only_its_own_text() -> None:
    made, messages = encoder(), []
    memo = made._memo
    for number in range(8):
        before = memo.encoded_chars
        asked = f"{number} " + "what of it? " * 1_000
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": "Yes."}]
        made.encode_chat(Chat(messages=messages[:-1]), 0.0)
        if number:
            assert memo.encoded_chars - before < 1.1 * len(asked)


def test_chats_of_different_days_share_no_pieces() -> None:
    days = iter(["2026-03-04", "2026-03-05"])
    made = HarmonyEncoder(None, PieceMemo(LARGE), lambda _: next(days))
    first, second = (made.encode_chat(Chat(messages=[USER]), 0.0) for _ in range(2))
    assert first.tolist() != second.tolist()
    assert made._memo.reused_chars == 0


@pytest.mark.parametrize(
    "chat",
    [
        Chat(messages=[USER], reasoning_effort="minimal"),
        Chat(messages=[{"role": "critic", "content": "x"}]),
        Chat(messages=[{"role": "user", "content": "\ud800"}]),
        Chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]),
        Chat(messages=[{"role": "user", "content": 5}]),
        Chat(messages=[{"role": "assistant", "tool_calls": [5]}]),
        Chat(
            messages=[{"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": 1}}}]}]
        ),
        Chat(messages=[USER], tools=[{"type": "function"}]),
        *(Chat(messages=[USER], tools=[tool]) for tool in WRONG_TOOLS),
        Chat(messages=[USER], tools=[{"function": {"name": "f", "parameters": {"a": 10**24}}}]),
        Chat(messages=[USER], tools=[{"type": "web", "function": {"name": "x"}}]),
        Chat(messages=[USER], tools=[{"function": {"name": 5}}]),
    ],
)
def test_chats_unknown_to_harmony_are_refused(chat: Chat) -> None:
    with pytest.raises(PromptError):
        encoder().encode_chat(chat, 0.0)


def test_long_chats_are_refused() -> None:
    with pytest.raises(PromptError, match="more than 500 characters"):
        encoder(max_chars=500).encode_chat(Chat(messages=[USER | {"content": "x" * 501}]), 0.0)


def test_plain_prompts_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(PromptError):
        encoder().encode("x")

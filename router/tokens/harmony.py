"""Renders chats of gpt-oss as vLLM 0.32 does: in OpenAI's harmony format, not by a chat template.

A chat becomes a list of turns: a system turn with the date, a developer turn with instructions and
tools, and then one or more turns for each message. The token ids of a turn are a header, its texts
and an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import openai_harmony as harmony

from engine.wire.memo import MemoEncoder, PieceMemo, array_of
from engine.wire.tokens import MAX_MESSAGES, Chat, Message, PromptError
from router.body.scan import Tokens
from router.tokens.pieces import Piece, cut, ids_of

_EFFORTS = {
    "low": harmony.ReasoningEffort.LOW,
    "medium": harmony.ReasoningEffort.MEDIUM,
    "high": harmony.ReasoningEffort.HIGH,
}
_MEMO_NAME = b"harmony"
# Errors that a client's values of other types, sizes and depths cause in this code and in
# harmony's.
_MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)


class Turn(NamedTuple):
    """One turn of a chat in OpenAI's harmony format. Lifetime: call."""

    author: str  # with the recipient of a call
    texts: Sequence[str]
    channel: str | None = None  # with all else that stands there
    is_call: bool = False


class Instructions(NamedTuple):
    """The developer turn of a chat, with instructions and tools. Lifetime: call."""

    text: str | None
    tools: Sequence[dict[str, Any]] | None = None


class HarmonyEncoder:
    """Encodes chats in the harmony format, and plain prompts with `texts`; if `texts` is None,
    plain prompts are rejected. Lifetime: process.

    `day_of` returns, for a Unix time, the date that engines write into the system turn. Chats of
    more than `max_chars` characters are rejected.
    """

    cuts_chats = False

    def __init__(
        self,
        texts: MemoEncoder | None,
        memo: PieceMemo,
        day_of: Callable[[float], str],
        max_chars: int | None = None,
    ) -> None:
        self._texts = texts
        self._memo = memo
        self._day_of = day_of
        self._max_chars = max_chars
        self._encoding = _encoding()
        special = partial(self._encoding.encode, allowed_special="all")
        self._start, self._channel, self._message, self._end, self._call = special(
            "<|start|><|channel|><|message|><|end|><|call|>"
        )
        self._next = array_of(special("<|start|>assistant"))  # begins the answer

    def encode(self, text: str, add_special_tokens: bool = True, salt: str | None = None) -> Tokens:
        if self._texts is None:
            raise PromptError("plain prompts need a tokenizer.json")
        return self._texts.encode(text, add_special_tokens, salt)

    def encode_chat(self, chat: Chat, now_s: float, salt: str | None = None) -> Tokens:
        """Return the token ids of a chat's prompt. Raises PromptError if the chat cannot be
        rendered.

        For gpt-oss, vLLM ignores `continue_final_message`, `add_generation_prompt`,
        `add_special_tokens` and variables for templates.
        """
        if len(chat.messages) > MAX_MESSAGES:
            raise PromptError(f"{len(chat.messages)} messages; at most {MAX_MESSAGES}", "messages")
        if chat.reasoning_effort is not None and chat.reasoning_effort not in _EFFORTS:
            raise PromptError("harmony does not know this effort", "reasoning_effort")
        try:
            pieces = [*self._preamble(chat, now_s), *self._of_turns(chat)]
        except PromptError:
            raise
        except _MALFORMED as error:
            raise PromptError(f"the chat is malformed: {error!r}", "messages") from error
        chars = sum(piece.chars for piece in pieces)
        if self._max_chars is not None and chars > self._max_chars:
            raise PromptError(f"the chat has more than {self._max_chars} characters")
        return np.concatenate([*ids_of(pieces, self._memo, salt, _MEMO_NAME), self._next])

    def _preamble(self, chat: Chat, now_s: float) -> Iterator[Piece]:
        day, effort, tools = self._day_of(now_s), chat.reasoning_effort, chat.tools or None
        key = msgspec.msgpack.encode(("system", day, effort, tools is not None))
        yield Piece(key, len(key), partial(self._system, day, effort, tools is not None))
        text = _instructions(chat.messages)
        if text or tools:
            yield self._developer(Instructions(text, tools))

    def _of_turns(self, chat: Chat) -> Iterator[Piece]:
        messages = chat.messages[_instructed(chat.messages) :]
        for turn in _without_past_analysis(list(_turns(messages))):
            if isinstance(turn, Instructions):
                yield self._developer(turn)
            else:
                yield from self._pieces(turn)

    def _pieces(self, turn: Turn) -> Iterator[Piece]:
        """Yield the turn's texts in pieces that begin and end between tokens; the first piece
        includes the header.
        """
        header: tuple[str, str | None] | None = (turn.author, turn.channel)
        parts = [part for text in turn.texts for part in cut(text)] or [""]
        for place, text in enumerate(parts, 1):
            end = None if place < len(parts) else self._call if turn.is_call else self._end
            key = msgspec.msgpack.encode((text, header, end))
            yield Piece(key, len(text), partial(self._part, text, header, end))
            header = None

    def _part(self, text: str, header: tuple[str, str | None] | None, end: int | None) -> list[int]:
        plain = partial(self._encoding.encode, disallowed_special=())
        ids = plain(text)
        if header is not None:
            author, channel = header
            of_channel = [self._channel, *plain(channel)] if channel is not None else []
            ids = [self._start, *plain(author), *of_channel, self._message, *ids]
        return ids if end is None else [*ids, end]

    def _system(self, day: str, effort: str | None, has_tools: bool) -> list[int]:
        content = harmony.SystemContent.new().with_conversation_start_date(day)
        if effort is not None:
            content = content.with_reasoning_effort(_EFFORTS[effort])
        turn = harmony.Message.from_role_and_content(harmony.Role.SYSTEM, content)
        options = harmony.RenderOptions(conversation_has_function_tools=has_tools)
        ids: list[int] = self._encoding.render(turn, options)
        return ids

    def _developer(self, turn: Instructions) -> Piece:
        key = msgspec.msgpack.encode(("developer", *turn))
        return Piece(key, len(key), partial(self._instructions, turn))

    def _instructions(self, turn: Instructions) -> list[int]:
        content = harmony.DeveloperContent.new()
        try:
            if turn.text is not None:
                content = content.with_instructions(turn.text)
            if turn.tools is not None:
                content = content.with_function_tools(list(map(_described, turn.tools)))
            message = harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)
            ids: list[int] = self._encoding.render(message)
        except (*_MALFORMED, harmony.HarmonyError) as error:
            raise PromptError(f"harmony refuses the instructions or tools: {error}") from error
        return ids


@cache
def _encoding() -> harmony.HarmonyEncoding:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def _described(tool: dict[str, Any]) -> harmony.ToolDescription:
    if tool.get("type", "function") != "function":
        raise ValueError("a tool is no function")
    function = tool["function"]
    return harmony.ToolDescription.new(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters"),
    )


def _instructed(messages: Sequence[Message]) -> int:
    """Return how many of the first messages are instructions: 1 or 0."""
    return int(bool(messages) and messages[0].get("role") in ("system", "developer"))


def _instructions(messages: Sequence[Message]) -> str | None:
    return _flat(messages[0].get("content")) if _instructed(messages) else None


def _flat(content: Any) -> str | None:
    """Return all texts in a message's content as one text; None if there is none."""
    if content is None or isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part.get("text") is not None]
    return "".join(texts) if texts else None


def _turns(messages: Sequence[Message]) -> Iterator[Turn | Instructions]:
    names = {
        call.get("id"): call.get("function", {}).get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            yield from _of_assistant(message)
        elif role == "tool":
            author = f"functions.{names.get(message.get('tool_call_id', ''), '')}"
            yield Turn(author, (_flat(content) or "",), "commentary to=assistant")
        elif role == "user":
            yield Turn("user", _texts(content))
        elif role in ("system", "developer"):
            if (text := _flat(content)) is not None:
                yield Instructions(text)
        else:
            raise PromptError("harmony does not know this role", "messages")


def _of_assistant(message: Message) -> Iterator[Turn]:
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    thought = [Turn("assistant", (reasoning,), "analysis")] if reasoning else []
    calls = message.get("tool_calls")
    if not calls:
        yield from thought
        texts = _texts(message.get("content"))
        if texts and texts[0]:
            yield Turn("assistant", texts, "final")
        return
    if said := _flat(message.get("content")):
        yield Turn("assistant", (said,), "commentary")
    yield from thought
    for call in calls:
        function = call.get("function", {})
        # The place of the recipient, and `json` without <|constrain|>, are special to gpt-oss.
        author = f"assistant to=functions.{function.get('name', '')}"
        yield Turn(author, (function.get("arguments") or "",), "commentary json", True)


def _texts(content: Any) -> Sequence[str]:
    if not content:
        return ("",)
    if isinstance(content, str):
        return (content,)
    return [part.get("text", "") for part in content]


def _without_past_analysis(turns: Sequence[Turn | Instructions]) -> Iterator[Turn | Instructions]:
    """Yield all turns except the model's analysis turns before its last final answer."""
    channels = [None if isinstance(turn, Instructions) else turn.channel for turn in turns]
    last = max((at for at, channel in enumerate(channels) if channel == "final"), default=-1)
    for at, turn in enumerate(turns):
        if at > last or channels[at] != "analysis":
            yield turn

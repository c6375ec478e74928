"""Encodes prompts of Mistral's models as vLLM 0.32 does: with mistral-common and its tekken.json.

mistral-common renders a chat to control tokens and texts. Here it gets a tokenizer that only
collects the texts; their ids are then taken from the memo if it has them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mistral_common.protocol.instruct.request import ChatCompletionRequest, ReasoningEffort
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from engine.wire.memo import PieceMemo, Tokens, array_of
from engine.wire.template import declared
from engine.wire.tokens import MAX_MESSAGES, Chat, Message, PromptError
from router.tokens.pieces import Piece, cut, ids_of

_MEMO_NAME = b"tekken"
_PARTS = frozenset({"text", "thinking"})
_ID_CHARS = 9  # of a call, as Mistral's models know them
_EFFORT_VERSION = 15  # of the tokenizer, from which on chats have an effort
_EFFORTS = frozenset(effort.value for effort in ReasoningEffort)


class _Noting:
    """A tokenizer that collects each text and returns a placeholder for it, a negative number.
    Lifetime: call.

    All other methods are those of the plain tokenizer.
    """

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        if bos or eos:
            raise PromptError("a text with ends of its own")
        self.texts.append(text)
        return [-len(self.texts)]


class TekkenEncoder:
    """Encodes prompts with the `tekken.json` in a folder. Lifetime: process.

    Prompts of more than `max_chars` characters are rejected. Raises ValueError if the file cannot
    be parsed.
    """

    cuts_chats = True

    def __init__(self, file: Path, memo: PieceMemo, max_chars: int | None = None) -> None:
        try:
            whole: Any = MistralTokenizer.from_file(file, mode=ValidationMode.test)
        except Exception as error:  # the library raises errors of any type
            raise ValueError(f"{file}: {error}") from error
        self._instruct = whole.instruct_tokenizer
        self._validator = whole._chat_completion_request_validator
        self._normalizer = whole._instruct_request_normalizer
        self._plain = self._instruct.tokenizer
        self._memo = memo
        self._max_chars = max_chars
        self._has_effort = int(self._plain.version.value.split("v")[-1]) >= _EFFORT_VERSION

    def encode(self, text: str, add_special_tokens: bool = True, salt: str | None = None) -> Tokens:
        self._check([text])
        begin = array_of([self._plain.bos_id] if add_special_tokens else [])
        ids = ids_of(map(self._piece, cut(text)), self._memo, salt, _MEMO_NAME)
        return np.concatenate([begin, *ids])

    def encode_chat(self, chat: Chat, now_s: float, salt: str | None = None) -> Tokens:
        """Return the token ids of a chat's prompt. Raises PromptError if vLLM would refuse the
        chat.
        """
        if chat.chat_template_kwargs is not None:
            raise PromptError("Mistral's models have no template", "chat_template_kwargs")
        if not 0 < len(chat.messages) <= MAX_MESSAGES:
            raise PromptError(f"{len(chat.messages)} messages", "messages")
        if chat.reasoning_effort and chat.reasoning_effort not in _EFFORTS:
            raise PromptError("Mistral's models do not know this effort", "reasoning_effort")
        answered = chat.messages[-1].get("role") == "assistant"
        begun = answered and chat.add_generation_prompt
        if begun or (chat.continue_final_message and not answered):
            raise PromptError("an answer is begun, or none is to be continued", "messages")
        tokens, texts = self._rendered(chat)
        self._check(texts)
        ids = ids_of(map(self._piece, texts), self._memo, salt, _MEMO_NAME)
        return np.concatenate(list(_joined(tokens, ids)))

    def _rendered(self, chat: Chat) -> tuple[list[int], list[str]]:
        """Return the chat's control tokens, with placeholders for texts, and the texts."""
        effort = {"reasoning_effort": chat.reasoning_effort} if self._has_effort else {}
        noting = _Noting(self._plain)
        instruct = copy.copy(self._instruct)
        instruct.tokenizer = noting
        instruct.decode = _nothing  # it would decode all ids to a text that is not used
        mistral: Any = MistralTokenizer(instruct, self._validator, self._normalizer)
        try:
            request: Any = ChatCompletionRequest.from_openai(
                messages=list(map(_prepared, chat.messages)),
                tools=declared(chat.tools),
                continue_final_message=chat.continue_final_message,
                **effort,
            )
            return mistral.encode_chat_completion(request).tokens, noting.texts
        except Exception as error:  # asserts among them
            raise PromptError(f"mistral-common refuses the chat: {error}", "messages") from error

    def _piece(self, text: str) -> Piece:
        try:
            key = msgspec.msgpack.encode(text)
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid Unicode: {error.reason}") from error
        return Piece(key, len(text), partial(self._plain.encode, text, bos=False, eos=False))

    def _check(self, texts: Sequence[str]) -> None:
        if self._max_chars is not None and sum(map(len, texts)) > self._max_chars:
            raise PromptError(f"the prompt has more than {self._max_chars} characters")


def _nothing(*_arguments: Any, **_options: Any) -> str:
    return ""


def _joined(tokens: Sequence[int], texts: Sequence[Tokens]) -> Iterator[Tokens]:
    """Yield the token ids, with the ids of each text in place of its placeholder."""
    run: list[int] = []
    for token in tokens:
        if token >= 0:
            run.append(token)
        else:
            yield array_of(run)
            yield texts[-token - 1]
            run = []
    yield array_of(run)


def _prepared(message: Message) -> Message:
    """Return the message with the ids of its tool calls cut to the length that the model knows.

    Media are rejected, because mistral-common would download them.
    """
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and any(part["type"] not in _PARTS for part in content):
        raise PromptError("a part that is no text", "messages")
    if role == "assistant":
        calls = [
            {**call, "id": call["id"][-_ID_CHARS:]} for call in message.get("tool_calls") or ()
        ]
        return {**message, "tool_calls": calls}
    if role == "tool" and "tool_call_id" in message:
        return {**message, "tool_call_id": message["tool_call_id"][-_ID_CHARS:]}
    return message

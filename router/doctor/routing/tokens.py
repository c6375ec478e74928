"""Compares the token ids that a folder's tokenizer and an engine make of fixed prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.wire.tokens import Chat, PromptError

TEXT = "Naïve facts, 12345 of them:\n\tdef f(x):  return {'x': x}\n\n東京 привет 🦊 <end> "
_USER_MESSAGE = {"role": "user", "content": f" {TEXT} "}
_CHATS = (
    [_USER_MESSAGE],
    [{"role": "system", "content": "Answer in one word."}, _USER_MESSAGE],
    [_USER_MESSAGE, {"role": "assistant", "content": "Fox. "}, _USER_MESSAGE],
)
_MEMO_BYTES, _MOST_CHARS = 1 << 20, 1 << 20


class _Ids(msgspec.Struct):
    tokens: list[int]


class FixedPrompt(NamedTuple):
    """A request to `/tokenize` with a fixed prompt, and the token ids that the folder's tokenizer
    makes of the prompt.
    """

    chat: bool
    body: dict[str, Any]
    own: list[int]


@dataclass(frozen=True, slots=True)
class ComparedTokens:
    """Counts the fixed prompts, texts and chats, and those whose token ids at the engine differ
    from the folder's.
    """

    texts: int = 0
    other_texts: int = 0
    chats: int = 0
    other_chats: int = 0

    def __add__(self, more: ComparedTokens) -> ComparedTokens:
        return ComparedTokens(
            self.texts + more.texts,
            self.other_texts + more.other_texts,
            self.chats + more.chats,
            self.other_chats + more.other_chats,
        )


def fixed_prompts(folder: Path, now_s: float) -> list[FixedPrompt]:
    """Return the fixed prompts with the ids that the folder's tokenizer makes of them. `now_s` is
    the wall clock, for templates that print the date. Raises ValueError if the folder has no
    tokenizer.
    """
    from engine.wire.hf import HfTokenizer  # brings tokenizers and jinja2, needed here only
    from engine.wire.memo import MemoEncoder

    try:
        tokenizer = HfTokenizer(folder, "auto", {})
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror or error}") from error
    encoder = MemoEncoder(tokenizer, tokenizer, _MEMO_BYTES, max_chars=_MOST_CHARS)
    return list(_prompts(encoder, now_s))


def _prompts(encoder: Any, now_s: float) -> Iterator[FixedPrompt]:
    for special in (True, False):
        own = encoder.encode(TEXT, special).tolist()
        yield FixedPrompt(False, {"prompt": TEXT, "add_special_tokens": special}, own)
    for messages in _CHATS:
        try:
            own = encoder.encode_chat(Chat(messages=messages), now_s).tolist()
        except PromptError:  # the folder has no template for it
            continue
        yield FixedPrompt(True, {"messages": messages, "add_generation_prompt": True}, own)


def compared_tokens(prompt: FixedPrompt, answer: bytes) -> ComparedTokens:
    """Compare one answer of an engine with the folder's token ids. All counts are 0 if the answer
    cannot be read.
    """
    try:
        theirs = msgspec.json.decode(answer, type=_Ids).tokens
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ComparedTokens()
    other = int(theirs != prompt.own)
    if prompt.chat:
        return ComparedTokens(chats=1, other_chats=other)
    return ComparedTokens(texts=1, other_texts=other)

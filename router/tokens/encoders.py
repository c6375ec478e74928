"""The tokenizer that a configuration names, as each kind of engine reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from engine.wire.memo import MemoEncoder, PieceMemo
from engine.wire.tokens import Chat
from router.body.scan import Tokens


class PromptEncoder(Protocol):
    """Makes token ids of prompts as one kind of engine does. Several threads may call it."""

    def encode(self, text: str, add_special_tokens: bool = True, salt: str | None = None) -> Tokens:
        """Return the ids of a plain prompt. Raises PromptError."""

    def encode_chat(self, chat: Chat, now_s: float, salt: str | None = None) -> Tokens:
        """Return the ids of a chat's prompt. Raises PromptError."""


@dataclass(frozen=True, slots=True)
class TokenizerTerms:
    """Which tokenizer there is, and what it may take. Lifetime: process."""

    folder: str | None  # with tokenizer.json; None: there is none
    content_format: Literal["auto", "string", "openai"]  # of chat templates
    template_kwargs: str  # JSON, templates' default variables
    drops_unused_tools: bool  # where a chat's tool_choice is none
    memo_bytes: int  # of known beginnings of chats
    max_chars: int  # of one prompt's text
    waiting_requests: int  # that may wait for a thread


class Encoders:
    """The encoder of each kind of engine: one model's chats differ between them.

    Lifetime: process. They share `memo`. `usual` is for the kinds that `by_kind` does not name.
    """

    def __init__(
        self,
        usual: PromptEncoder | None,
        by_kind: Mapping[str, PromptEncoder],
        memo: PieceMemo,
    ) -> None:
        self._usual = usual
        self._by_kind = by_kind
        self.memo = memo

    def of(self, kind: str | None) -> PromptEncoder | None:
        """Return the encoder for a kind of engine; None where its prompts are read as text."""
        return self._by_kind.get(kind or "", self._usual)


def encoders_of(terms: TokenizerTerms) -> Encoders | None:
    """Return the encoders of the folder; None without one. Raises ValueError where they fail."""
    usual = encoder_of(terms)
    return None if usual is None else Encoders(usual, {}, usual.memo)


def encoder_of(terms: TokenizerTerms) -> MemoEncoder | None:
    """The tokenizer and its memo; None without one. Raises ValueError where it cannot be used."""
    if terms.folder is None:
        return None
    from engine.wire.hf import HfTokenizer  # brings tokenizers and jinja2, needed here only

    defaults = msgspec.json.decode(terms.template_kwargs, type=dict)
    try:
        tokenizer = HfTokenizer(Path(terms.folder), terms.content_format, defaults)
    except OSError as error:
        raise ValueError(f"tokenizer: {error}") from error
    return MemoEncoder(tokenizer, tokenizer, terms.memo_bytes, max_chars=terms.max_chars)

"""The tokenizer that a configuration names, and what it may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from engine.wire.memo import MemoEncoder


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

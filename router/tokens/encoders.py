"""Loads the configured tokenizer, and makes token ids with it as each kind of engine does."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from engine.wire.memo import MemoEncoder, PieceMemo
from engine.wire.tokens import Chat, PromptError
from router.body.scan import Tokens
from router.tokens.dates import date_of

log = logging.getLogger(__name__)

TEKKEN = "tekken.json"
NO_TOKENS = (
    "harmony and mistral-common are not installed: pip install 'oss-harmony>=0.0.11,<0.1' "
    "'mistral-common>=1.13,<2' (or '.[tokens]' in the checkout)"
)
# Engines that render gpt-oss by harmony; SGLang's chats use the template.
_HARMONY_KINDS = ("vllm", "trtllm")
_TEKKEN_KINDS = ("vllm",)
TokenizerMode = Literal["auto", "hf", "mistral"]


class PromptEncoder(Protocol):
    """Makes the token ids of prompts as one kind of engine does. It may be called by several
    threads.
    """

    @property
    def cuts_chats(self) -> bool:
        """True if the engine applies `truncate_prompt_tokens` to chats, too."""

    def encode(self, text: str, add_special_tokens: bool = True, salt: str | None = None) -> Tokens:
        """Return the token ids of a plain prompt. Raises PromptError if the prompt cannot be
        encoded.
        """

    def encode_chat(self, chat: Chat, now_s: float, salt: str | None = None) -> Tokens:
        """Return the token ids of a chat's prompt. Raises PromptError if the chat cannot be
        rendered.
        """


@dataclass(frozen=True, slots=True)
class TokenizerTerms:
    """The configured tokenizer and its limits. Lifetime: process."""

    folder: str | None  # with tokenizer.json or tekken.json; None: there is none
    mode: TokenizerMode  # which of them vLLM takes
    harmony_date: str  # in prompts of gpt-oss: a date, a time zone, or `local`
    content_format: Literal["auto", "string", "openai"]  # of chat templates
    template_kwargs: str  # JSON, templates' default variables
    drops_unused_tools: bool  # where a chat's tool_choice is none
    memo_bytes: int  # of known beginnings of chats
    max_chars: int  # of one prompt's text
    waiting_requests: int  # that may wait for a thread


class Encoders:
    """The prompt encoder for each kind of engine; engines differ in how they render one model's
    chats. Lifetime: process.

    All encoders share `memo`. `usual` is for the kinds of engine that are not in `by_kind`. The
    kinds in `rendering` answer /tokenize for chats with a template that they do not use to serve
    them.
    """

    def __init__(
        self,
        usual: PromptEncoder | None,
        by_kind: Mapping[str, PromptEncoder],
        memo: PieceMemo,
        rendering: Container[str] = (),
    ) -> None:
        self._usual = usual
        self._by_kind = by_kind
        self._rendering = rendering
        self.memo = memo

    def of(self, kind: str | None) -> PromptEncoder | None:
        """Return the encoder for a kind of engine; None if its prompts are read as text."""
        return self._by_kind.get(kind or "", self._usual)

    def is_rendering(self, kind: str | None) -> bool:
        """Return True if workers of this kind answer /tokenize for chats with a template that they
        do not use, so that only their render call shows the true ids.
        """
        return kind is not None and kind in self._rendering


class _WithoutChats:
    """An encoder of plain prompts only, for a router without the package that renders chats."""

    cuts_chats = True

    def __init__(self, usual: PromptEncoder) -> None:
        self.encode = usual.encode

    def encode_chat(self, chat: Chat, now_s: float, salt: str | None = None) -> Tokens:
        raise PromptError("chats need another package", "messages")


def encoders_of(terms: TokenizerTerms) -> Encoders | None:
    """Return the encoders made from the configured tokenizer's folder; None if no folder is
    configured. Raises ValueError if the tokenizer is unusable.
    """
    if terms.folder is None:
        return None
    folder = Path(terms.folder)
    memo = PieceMemo(terms.memo_bytes)
    usual = _by_template(terms, memo) if has_tokenizer_json(folder) else None
    if _is_gpt_oss(folder) and usual is not None:
        own = _by_harmony(terms, usual, memo)
        return Encoders(usual, dict.fromkeys(_HARMONY_KINDS, own), memo, _HARMONY_KINDS)
    if _is_tekken(folder, terms.mode):
        tekken = _by_tekken(terms, memo)
        if tekken is not None:
            return Encoders(usual, dict.fromkeys(_TEKKEN_KINDS, tekken), memo)
    if usual is None:
        raise ValueError(f"tokenizer: {folder} has no tokenizer.json")
    return Encoders(usual, {}, memo)


def has_tokenizer_json(folder: Path) -> bool:
    """Return True if the folder has a tokenizer in Hugging Face's format."""
    return (folder / "tokenizer.json").is_file()


def has_tekken(folder: Path) -> bool:
    """Return True if the folder has a tokenizer in Mistral's format."""
    return (folder / TEKKEN).is_file()


def _is_gpt_oss(folder: Path) -> bool:
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False
    return config.get("model_type") == "gpt_oss"


def _is_tekken(folder: Path, mode: TokenizerMode) -> bool:
    """Return True if vLLM uses Mistral's tokenizer for this model, as far as the folder shows it.

    By default, vLLM uses it if the weights are in Mistral's format; a folder without weights does
    not show that.
    """
    if not has_tekken(folder) or mode == "hf":
        return False
    if mode == "mistral" or not has_tokenizer_json(folder):
        return True
    weights = [path.name for path in folder.glob("*.safetensors")]
    return not weights or any(name.startswith("consolidated") for name in weights)


def _by_harmony(terms: TokenizerTerms, usual: MemoEncoder, memo: PieceMemo) -> PromptEncoder:
    if find_spec("openai_harmony") is None:
        _log_missing(terms, "gpt-oss's chats")
        return _WithoutChats(usual)
    from router.tokens.harmony import HarmonyEncoder

    return HarmonyEncoder(usual, memo, date_of(terms.harmony_date), terms.max_chars)


def _by_tekken(terms: TokenizerTerms, memo: PieceMemo) -> PromptEncoder | None:
    folder = Path(terms.folder or "")
    if find_spec("mistral_common") is None:
        if not has_tokenizer_json(folder):
            raise ValueError(f"tokenizer: {folder} has {TEKKEN} alone: {NO_TOKENS}")
        _log_missing(terms, "prompts by tekken.json")
        return None
    from router.tokens.tekken import TekkenEncoder

    return TekkenEncoder(folder / TEKKEN, memo, terms.max_chars)


def _log_missing(terms: TokenizerTerms, what: str) -> None:
    log.warning("tokenizer: %s: %s are matched by text: %s", terms.folder, what, NO_TOKENS)


def _by_template(terms: TokenizerTerms, memo: PieceMemo) -> MemoEncoder:
    from engine.wire.hf import HfTokenizer  # brings tokenizers and jinja2, needed here only

    defaults = msgspec.json.decode(terms.template_kwargs, type=dict)
    try:
        tokenizer = HfTokenizer(Path(terms.folder or ""), terms.content_format, defaults)
    except OSError as error:
        raise ValueError(f"tokenizer: {error}") from error
    return MemoEncoder(tokenizer, tokenizer, memo, max_chars=terms.max_chars)

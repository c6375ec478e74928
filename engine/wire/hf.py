"""A model's own tokenizer: `tokenizer.json` and its chat template, from a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from engine.wire.cuts import Cuts, cuts_of
from engine.wire.errors import PromptError
from engine.wire.model_dir import (
    file_text,
    json_object,
    load_tokenizer,
    special_tokens,
    template_sources,
)
from engine.wire.template import ChatTemplate, ContentFormat
from engine.wire.tokens import Chat

MAX_HELD_IDS = 16  # a character has at most four bytes, and a token at least one of them


class _Stream:
    """Incremental decoding of one sequence. Lifetime: request.

    The library holds back ids that do not end a character, and would do so for ever where
    they never make one; after MAX_HELD_IDS they are given as they are (U+FFFD).
    """

    __slots__ = ("_decoder", "_held", "_skips", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer, after: Sequence[int], skips: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skips
        self._decoder = DecodeStream(skip_special_tokens=skips)
        self._held: list[int] = []
        for token in after[-MAX_HELD_IDS:]:
            self.step(token)
        if self._held:  # they end within a character; what follows begins a new one
            self._held.clear()
            self._decoder = DecodeStream(skip_special_tokens=skips)

    def step(self, token: int) -> str:
        """The text that became certain with `token`."""
        text = self._decoder.step(self._tokenizer, token)
        if text:
            self._held.clear()
            return str(text)
        self._held.append(token)
        if len(self._held) < MAX_HELD_IDS:
            return ""
        text = self._tokenizer.decode(self._held, skip_special_tokens=self._skips)
        self._held.clear()
        self._decoder = DecodeStream(skip_special_tokens=self._skips)
        return str(text)


class HfTokenizer:
    """The tokenizer in a model directory. Lifetime: process; read once, then only used.

    `content_format` and `template_defaults` are the engine's, where it was told any.

    Raises OSError if `tokenizer.json` cannot be read, ValueError if a file does not parse.
    """

    def __init__(
        self,
        directory: Path,
        content_format: ContentFormat = "auto",
        template_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        path = directory / "tokenizer.json"
        text = file_text(path)
        config = json_object(directory / "tokenizer_config.json")
        special = special_tokens(json_object(directory / "special_tokens_map.json"))
        special.update(special_tokens(config))
        try:
            self._tokenizer = load_tokenizer(text, config, special)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._cuts = cuts_of(msgspec.json.decode(text), added)
        self._templates = {
            name: ChatTemplate(source, special, content_format, template_defaults)
            for name, source in template_sources(directory, config).items()
        }

    @property
    def vocab(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def cuts(self) -> Cuts | None:
        """Where its texts may be cut and encoded in pieces; None: nowhere."""
        return self._cuts

    @property
    def framing(self) -> tuple[list[int], list[int]]:
        """The ids that `add_special_tokens` puts before and after a plain prompt."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        ids: list[int] = encoding.ids
        own = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if not own:
            return ids, []
        return ids[: own[0]], ids[own[-1] + 1 :]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid Unicode: {error.reason}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(
        self, after: Sequence[int] = (), skip_special_tokens: bool = False
    ) -> Callable[[int], str]:
        return _Stream(self._tokenizer, after, skip_special_tokens).step

    def render(self, chat: Chat, now_s: float) -> str:
        return self._template(chat).render(chat, now_s)

    def encode_chat(self, chat: Chat, now_s: float) -> list[int]:
        return self.encode(self.render(chat, now_s), chat.add_special_tokens)

    def _template(self, chat: Chat) -> ChatTemplate:
        if chat.tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise PromptError("this model has no chat template; use /v1/completions", "messages")
        return self._templates["default"]

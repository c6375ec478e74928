"""A model's own tokenizer: `tokenizer.json` and its chat template, from a directory.

Which file wins follows transformers 5 (`tokenization_utils_base.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from engine.wire.errors import PromptError
from engine.wire.template import ChatTemplate
from engine.wire.tokens import Chat

MAX_FILE_BYTES = 256 << 20
MAX_HELD_IDS = 16  # a character has at most four bytes, and a token at least one of them


class _Stream:
    """Incremental decoding of one sequence. Lifetime: request.

    The library holds back ids that do not end a character, and would do so for ever where
    they never make one; after MAX_HELD_IDS they are given as they are (U+FFFD).
    """

    __slots__ = ("_decoder", "_held", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def step(self, token: int) -> str:
        """The text that became certain with `token`."""
        text = self._decoder.step(self._tokenizer, token)
        if text:
            self._held.clear()
            return str(text)
        self._held.append(token)
        if len(self._held) < MAX_HELD_IDS:
            return ""
        text = self._tokenizer.decode(self._held, skip_special_tokens=False)
        self._held.clear()
        self._decoder = DecodeStream(skip_special_tokens=False)
        return str(text)


class HfTokenizer:
    """The tokenizer in a model directory. Lifetime: process; read once, then only used.

    Raises OSError if `tokenizer.json` cannot be read, ValueError if a file does not parse.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        text = _text(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The library raises nothing narrower.
            raise ValueError(f"{path}: {error}") from error
        config = _json_object(directory / "tokenizer_config.json")
        special = _special_tokens(_json_object(directory / "special_tokens_map.json"))
        special.update(_special_tokens(config))
        self._templates = {
            name: ChatTemplate(source, special)
            for name, source in _template_sources(directory, config).items()
        }

    @property
    def vocab(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid Unicode: {error.reason}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def stream(self) -> Callable[[int], str]:
        return _Stream(self._tokenizer).step

    def render(self, chat: Chat, now_s: float) -> str:
        return self._template(chat).render(chat, now_s)

    def encode_chat(self, chat: Chat, now_s: float) -> list[int]:
        # The template writes the special tokens itself.
        return self.encode(self.render(chat, now_s), add_special_tokens=False)

    def _template(self, chat: Chat) -> ChatTemplate:
        if chat.tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise PromptError("this model has no chat template; use /v1/completions", "messages")
        return self._templates["default"]


def _template_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template sources by name: the files beside the tokenizer beat the configuration's key."""
    sources: dict[str, str] = {}
    key = config.get("chat_template")
    if isinstance(key, str):
        sources["default"] = key
    elif isinstance(key, list):
        for entry in key:
            if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                raise ValueError(
                    f"{directory}/tokenizer_config.json: chat_template entries need name, template"
                )
            sources[str(entry["name"])] = str(entry["template"])
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        sources[path.stem] = _text(path)
    if (directory / "chat_template.jinja").exists():
        sources["default"] = _text(directory / "chat_template.jinja")
    return sources


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind: a string, or an object with `content`."""
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return special


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(_text(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def _text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {size} bytes; at most {MAX_FILE_BYTES}")
    return path.read_text(encoding="utf-8")

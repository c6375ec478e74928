"""Loads a model's own tokenizer from a directory: `tokenizer.json`, special tokens and chat
templates.

Which file takes precedence, and what is changed in `tokenizer.json` at loading, follows
transformers 5 (`tokenization_utils_base.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from engine.wire.memo import Cuts, cuts_of
from engine.wire.template import ChatTemplate, ContentFormat
from engine.wire.tokens import Chat, PromptError, StreamDecoder

MAX_FILE_BYTES = 256 << 20
_PART_IDS = 1 << 16  # of a longer prompt, taken at a time: other threads wait for each part
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(
    text: str, config: Mapping[str, Any], special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """Return the tokenizer that the text of `tokenizer.json` describes, completed by `config`, the
    object in `tokenizer_config.json`.

    The tokens that are added around plain prompts stay as in the file; `add_bos_token` changes
    nothing. Raises ValueError if the text cannot be read.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The library raises no narrower type.
        raise ValueError(str(error)) from error
    # Some files carry the limits of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    present = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    listed = _listed_tokens(config)
    tokenizer.add_tokens([token for token in listed if repr(token) not in present])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for name, content in special.items():
        if content not in known:
            known.add(content)
            tokenizer.add_tokens([_named_token(content, config.get(name))])
    extra = dict.fromkeys(content for content in _extra_tokens(config) if content not in known)
    tokenizer.add_tokens([tokenizers.AddedToken(content, special=True) for content in extra])
    return tokenizer


def _listed_tokens(config: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Return the tokens in the field `added_tokens_decoder`, ordered by id. Raises ValueError for
    an invalid field.
    """
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return []
    try:
        rows = sorted((int(number), row) for number, row in listed.items())
        return [
            tokenizers.AddedToken(row["content"], **{f: row[f] for f in _FLAGS if f in row})
            for _, row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"added_tokens_decoder: {error!r}") from error


def _named_token(content: str, row: Any) -> tokenizers.AddedToken:
    """Return a special token with the flags that the file gives it; it is special in any case."""
    if not isinstance(row, dict):
        return tokenizers.AddedToken(content, special=True)
    token = tokenizers.AddedToken(content, **{flag: row[flag] for flag in _FLAGS if flag in row})
    token.special = True
    return token


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the further special tokens of the configuration, which are under
    `extra_special_tokens` or the older key `additional_special_tokens`.
    """
    key = "extra_special_tokens"
    extra = config.get(key if key in config else "additional_special_tokens")
    if isinstance(extra, dict):
        extra = list(extra.values())
    found = [one.get("content") if isinstance(one, dict) else one for one in extra or ()]
    return [content for content in found if isinstance(content, str)]


def template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of chat templates by name; files beside the tokenizer take precedence over
    the configuration's key.
    """
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
        sources[path.stem] = file_text(path)
    if (directory / "chat_template.jinja").exists():
        sources["default"] = file_text(directory / "chat_template.jinja")
    return sources


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens such as `bos_token`, each given as a string, or as an object with
    `content`.
    """
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return special


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(file_text(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def file_text(path: Path) -> str:
    """Return the text of a file. Raises OSError, or ValueError beyond MAX_FILE_BYTES."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {size} bytes; at most {MAX_FILE_BYTES}")
    return path.read_text(encoding="utf-8")


MAX_HELD_IDS = 16  # a character has at most four bytes, and a token at least one of them


class _Stream:
    """Incremental decoding of one sequence. Lifetime: request.

    The library holds back ids that do not end a character, for ever if they never do; after
    MAX_HELD_IDS they are returned as they are (U+FFFD).
    """

    __slots__ = ("_decoder", "_held", "_skips", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer, after: Sequence[int], skips: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skips
        self._decoder = DecodeStream(skip_special_tokens=skips)
        self._held: list[int] = []
        for token in after[-MAX_HELD_IDS:]:
            self.step(token)
        if self._held:  # they end within a character; the next id begins a new one
            self._held.clear()
            self._decoder = DecodeStream(skip_special_tokens=skips)

    def step(self, token: int) -> str:
        text = self._decoder.step(self._tokenizer, token)
        if text:
            self._held.clear()
            return str(text)
        self._held.append(token)
        return "" if len(self._held) < MAX_HELD_IDS else self.end()

    def end(self) -> str:
        text = self._tokenizer.decode(self._held, skip_special_tokens=self._skips)
        self._held.clear()
        self._decoder = DecodeStream(skip_special_tokens=self._skips)
        return str(text)


class HfTokenizer:
    """The tokenizer in a model directory.

    Lifetime: process; the files are read once. `content_format` and `template_defaults` are those
    of the engine, if it has any. Raises OSError if `tokenizer.json` cannot be read, ValueError if a
    file does not parse.
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
        # Ids that are cut off are kept as further parts.
        self._tokenizer.enable_truncation(_PART_IDS)
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
        """The places at which texts for this tokenizer may be cut and encoded in pieces; None if
        there are none.
        """
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
        # Unlike `encode`, a batch is encoded without Python's lock, and without offsets.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        rest = encoding.overflowing
        if rest and add_special_tokens:  # each part would have them
            before, after = self.framing
            return [*before, *self.encode(text, False), *after]
        ids: list[int] = encoding.ids
        for part in rest:
            ids += part.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, after: Sequence[int] = (), skip_special_tokens: bool = False) -> StreamDecoder:
        return _Stream(self._tokenizer, after, skip_special_tokens)

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

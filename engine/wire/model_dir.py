"""The files of a model directory that make its prompts: tokenizer, special tokens, templates.

Which file wins, and what is changed of `tokenizer.json` when it is loaded, follows transformers 5
(`tokenization_utils_base.py`, `tokenization_utils_tokenizers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

MAX_FILE_BYTES = 256 << 20
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(
    text: str, config: Mapping[str, Any], special: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """The tokenizer of `tokenizer.json`'s `text`, completed by `tokenizer_config.json`'s object.

    What is put around plain prompts stays the file's own; `add_bos_token` changes nothing.
    Raises ValueError where it does not parse.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The library raises nothing narrower.
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
    """`added_tokens_decoder`, by id."""
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
    """A special token with the flags it was given; special in any case."""
    if not isinstance(row, dict):
        return tokenizers.AddedToken(content, special=True)
    token = tokenizers.AddedToken(content, **{flag: row[flag] for flag in _FLAGS if flag in row})
    token.special = True
    return token


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Further special tokens, by the newer name and the older one."""
    key = "extra_special_tokens"
    extra = config.get(key if key in config else "additional_special_tokens")
    if isinstance(extra, dict):
        extra = list(extra.values())
    found = [one.get("content") if isinstance(one, dict) else one for one in extra or ()]
    return [content for content in found if isinstance(content, str)]


def template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
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
        sources[path.stem] = file_text(path)
    if (directory / "chat_template.jinja").exists():
        sources["default"] = file_text(directory / "chat_template.jinja")
    return sources


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind: a string, or an object with `content`."""
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return special


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(file_text(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def file_text(path: Path) -> str:
    """The whole file. Raises OSError; ValueError beyond MAX_FILE_BYTES."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {size} bytes; at most {MAX_FILE_BYTES}")
    return path.read_text(encoding="utf-8")

"""Media in chats: which parts of a message are not text, and what stands for them in a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from router.body.scan import Message

# Parts whose content is text (vLLM 0.33 and OpenAI's API).
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_SHORT_CHARS = 64  # of names and options, which are kept as they are


def has_media(messages: Iterable[Message]) -> bool:
    """Whether any message has a part that is not text."""
    return any(
        isinstance(content := message.get("content"), list) and any(map(_is_medium, content))
        for message in messages
    )


def without_media(messages: Iterable[Message]) -> list[Message]:
    """The messages with every medium replaced by its XXH3-128, hexadecimal."""
    return [_shown(message) for message in messages]


def _shown(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_digested(part) if _is_medium(part) else part for part in content]
    return {**message, "content": parts}


def _is_medium(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") not in TEXT_PARTS


def _digested(value: Any) -> Any:
    """The same value with long texts (addresses, base64) replaced by their digests."""
    if isinstance(value, str) and len(value) > _SHORT_CHARS:
        return xxhash.xxh3_128_hexdigest(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return {_digested(key): _digested(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_digested(inner) for inner in value]
    return value

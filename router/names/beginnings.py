"""Finds the beginning of a conversation, which is the same in each of its requests."""

from __future__ import annotations

from typing import Any

import msgspec

from kvkernels import body_fields, json_items

_LISTS = ("messages", "input")
_OTHERS = ("system", "instructions", "prompt", "text", "query", "documents", "token_ids")
_FIELDS = (*_LISTS, *_OTHERS)
_MOST_BYTES = 4_096  # of each part
_MOST_ITEMS = 1 << 20
_LOOKED_AT = 16  # messages, among which the first one of the user is
_MESSAGE = msgspec.json.Decoder(dict[str, Any])


def beginning_of(body: bytes) -> bytes:
    """Return the text at the beginning of a request's conversation, up to and including the user's
    first message.

    For a request without messages, it is the beginning of the prompt. It is empty if the body has
    neither.
    """
    fault, _, found = body_fields(body, _FIELDS)
    if fault is not None:
        return b""
    view, parts = memoryview(body), list[bytes]()
    for name, field in zip(_FIELDS, found, strict=True):
        if field is None:
            continue
        raw = view[field[0] : field[1]]
        if name in _LISTS and raw[0] == ord("[") and (texts := _first_messages(raw)):
            parts += texts
        else:
            parts.append(bytes(raw[:_MOST_BYTES]))
    return b"\n".join(parts)


def _first_messages(raw: memoryview) -> list[bytes]:
    """Return the texts of the messages up to the user's first one; an empty list if `raw` does not
    contain messages.
    """
    texts = list[bytes]()
    for begin, end in (json_items(raw, _MOST_ITEMS) or ())[:_LOOKED_AT]:
        try:
            message = _MESSAGE.decode(raw[begin:end])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return texts
        text = _text(message.get("content"))
        texts.append(text.encode("utf-8", "surrogatepass")[:_MOST_BYTES])
        if message.get("role") == "user":
            break
    return texts


def _text(content: Any) -> str:
    """Return the text of a message, without cache marks, which clients move from one turn to the
    next.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "\n".join(text for text in texts if isinstance(text, str))

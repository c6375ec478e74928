"""Handles media in prompts: the parts of chats that are not text, and the tokens that represent
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt
import xxhash

from kvkernels import chain_seed, media_chain_hashes
from policies.contract import Hashes
from router.body.scan import Message
from router.engines.media import Medium

# Parts whose content is text (vLLM 0.33 and OpenAI's API).
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_TEXT_TYPES = tuple(TEXT_PARTS)  # compared with any JSON value
_SHORT_CHARS = 64  # of names and options, which are kept as they are
_ADDRESS_BYTES = 64  # of a text, in which an address shows itself
_MAX_NESTED = 64  # deeper values of a medium count as one
_MAX_OBJECTS = 4  # nested, in which an address is looked for


class MessageMedia(NamedTuple):
    """The facts that are known about the media in one message. Lifetime: call."""

    has_media: bool
    has_addresses: bool  # of media that are not in the message itself


NO_MEDIA = MessageMedia(False, False)


class _Content(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


_RawPart = dict[str, msgspec.Raw]
_JSON = msgspec.json.Decoder()
_MESSAGE = msgspec.json.Decoder(_Content)
_PART = msgspec.json.Decoder(_RawPart)
_PARTS = msgspec.json.Decoder(list[_RawPart])


def has_media(messages: Iterable[Message]) -> bool:
    """Return whether any message has a part that is not text."""
    return any(
        isinstance(content := message.get("content"), list) and any(map(_is_medium, content))
        for message in messages
    )


def media_in(message: bytes | msgspec.Raw) -> MessageMedia:
    """Return whether a message in JSON has media; both fields are True if the message is
    unreadable.

    Only a part whose type says so counts as text, because vLLM also accepts media in parts without
    a type.
    """
    try:
        content = memoryview(_MESSAGE.decode(message).content)
        if bytes(content[:1]) != b"[":
            return NO_MEDIA
        media = [part for part in _PARTS.decode(content) if not _is_text(part)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return MessageMedia(True, True)
    return MessageMedia(bool(media), any(_is_outside(part) for part in media))


def _is_text(part: _RawPart) -> bool:
    kind = part.get("type")
    return kind is not None and _JSON.decode(kind) in _TEXT_TYPES


def _is_outside(part: _RawPart, nested: int = 0) -> bool:
    """Return True if a part may contain an address whose content others can change."""
    for name, value in part.items():
        text = memoryview(value)
        if name == "type":
            continue
        if bytes(text[:1]) == b"[" or nested > _MAX_OBJECTS:
            return True
        if bytes(text[:1]) == b"{" and _is_outside(_PART.decode(text), nested + 1):
            return True
        begin = bytes(text[:_ADDRESS_BYTES])
        is_text = begin[:1] == b'"' and not begin.startswith(b'"data:')
        if is_text and (b":" in begin or b"\\" in begin):
            return True
    return False


def without_media(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with each image or other medium replaced by its XXH3-128 in
    hexadecimal.
    """
    return [_shown(message) for message in messages]


def _shown(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_digested(part) if _is_medium(part) else part for part in content]
    return {**message, "content": parts}


def _is_medium(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") not in TEXT_PARTS


def _digested(value: Any, nested: int = 0) -> Any:
    """Return the value with long texts, such as addresses or base64, replaced by digests."""
    if nested >= _MAX_NESTED:
        return "deep"
    if isinstance(value, str) and len(value) > _SHORT_CHARS:
        return xxhash.xxh3_128_hexdigest(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return {_digested(key): _digested(inner, nested + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_digested(inner, nested + 1) for inner in value]
    return value


def media_chains(
    tokens: npt.NDArray[Any],
    media: Sequence[Medium],
    block_sizes: Iterable[int],
    *,
    model: str,
    adapter: str | None = None,
    salt: str | None = None,
) -> Mapping[int, Hashes]:
    """Return the chain hashes of a prompt with media, by block size. vLLM's KV events have the same
    hashes for the prompt's blocks.

    `tokens` are int32 or int64, and `media` is in the order of the tokens; `model` is the base
    model if there is an `adapter`.
    """
    seed = chain_seed(model, adapter, salt)
    return {size: media_chain_hashes(tokens, size, seed, media) for size in block_sizes}

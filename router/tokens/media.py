"""Media in prompts: the parts of chats that are no text, and the tokens that stand for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import xxhash

from kvkernels import chain_seed, media_chain_hashes
from policies.contract import Hashes
from router.body.scan import Message
from router.engines.media import Medium

# Parts whose content is text (vLLM 0.33 and OpenAI's API).
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
# The type of another part, in a message's JSON; calls of functions are none.
_MEDIUM = re.compile(
    rb'"type"\s*:\s*"(?!(?:text|input_text|output_text|refusal|thinking|function)")'
)
_SHORT_CHARS = 64  # of names and options, which are kept as they are


def has_media(messages: Iterable[Message]) -> bool:
    """Whether any message has a part that is not text."""
    return any(
        isinstance(content := message.get("content"), list) and any(map(_is_medium, content))
        for message in messages
    )


def may_have_media(body: bytes | memoryview) -> bool:
    """Return False if messages, as JSON, have no part that is not text."""
    return _MEDIUM.search(body) is not None


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


def media_chains(
    tokens: npt.NDArray[Any],
    media: Sequence[Medium],
    block_sizes: Iterable[int],
    *,
    model: str,
    adapter: str | None = None,
    salt: str | None = None,
) -> Mapping[int, Hashes]:
    """Return the chain hashes of a prompt with media, by block size.

    KV events of vLLM give the same hashes to its blocks. `tokens` are int32 or int64, `media` in
    the order of their tokens; `model` is the base, where there is an `adapter`.
    """
    seed = chain_seed(model, adapter, salt)
    return {size: media_chain_hashes(tokens, size, seed, media) for size in block_sizes}

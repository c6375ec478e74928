"""Media in prompts: the parts of chats that are no text, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt
import xxhash

from kvkernels import chain_seed, media_chain_hashes
from policies.contract import Hashes
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


class Medium(NamedTuple):
    """A medium of a prompt, and the tokens that stand for it."""

    identifier: str  # in vLLM's KV events
    offset: int  # of its first token in the prompt
    length: int  # in tokens


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class Features(msgspec.Struct):
    """The media of a prompt, as vLLM's render paths answer them: by modality, in order."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Placeholder]]


def media_of(features: Features, tokens: int) -> list[Medium]:
    """Return the media of a prompt of so many tokens, in the order of their tokens.

    Raises ValueError for an answer in which they do not fit together.
    """
    media = list[Medium]()
    if features.mm_hashes.keys() != features.mm_placeholders.keys():
        raise ValueError("its media are not of the modalities of its placeholders")
    for modality, places in features.mm_placeholders.items():
        for identifier, place in zip(features.mm_hashes[modality], places, strict=True):
            if place.offset < 0 or place.length < 1 or place.offset + place.length > tokens:
                raise ValueError(f"the tokens of a medium ({modality}) are not in its prompt")
            media.append(Medium(identifier, place.offset, place.length))
    return sorted(media, key=lambda medium: medium.offset)


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

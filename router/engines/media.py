"""Describes the images and other media of a prompt as engines name and place them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

_Name = Annotated[str, Meta(min_length=1, max_length=1_024)]
MAX_MEDIA = 4_096  # in one prompt


class Medium(NamedTuple):
    """An image or other medium of a prompt, and the tokens that take its place."""

    identifier: str  # in vLLM's KV events
    offset: int  # of its first token in the prompt
    length: int  # in tokens


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class Features(msgspec.Struct):
    """The media of a prompt, as vLLM's render paths return them: by modality, in the order of the
    prompt.
    """

    mm_hashes: dict[str, list[_Name]] = msgspec.field(default_factory=dict)
    mm_placeholders: dict[str, list[_Placeholder]] = msgspec.field(default_factory=dict)


def media_of(features: Features, tokens: int) -> list[Medium]:
    """Return the media of a prompt in the order of their tokens. Raises ValueError for an answer
    that contradicts itself.
    """
    media = list[Medium]()
    if features.mm_hashes.keys() != features.mm_placeholders.keys():
        raise ValueError("its media are not of the modalities of its placeholders")
    for modality, places in features.mm_placeholders.items():
        for identifier, place in zip(features.mm_hashes[modality], places, strict=True):
            if place.offset < 0 or place.length < 1 or place.offset + place.length > tokens:
                raise ValueError(f"the tokens of a medium ({modality}) are not in its prompt")
            media.append(Medium(identifier, place.offset, place.length))
    if len(media) > MAX_MEDIA:
        raise ValueError(f"{len(media)} media are more than {MAX_MEDIA}")
    return sorted(media, key=lambda medium: medium.offset)

"""The plain-Python oracle of the chain hashes of prompts with images or other media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from tests.oracles.index import Hashes, _buffer, _integer, block_bytes, in_range, uint64

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST = 2**31 - 1


class Medium(NamedTuple):
    """A medium among a prompt's tokens; `length` tokens from `offset` on stand for it."""

    identifier: bytes
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The place after the medium's last token."""
        return self.offset + self.length


def media_chain_hashes(
    tokens: Buffer, block_size: int, seed: int, media: Sequence[tuple[str, int, int]]
) -> Hashes:
    """Return the chain hashes of a prompt in which tokens stand for media. `tokens` are int32 or
    int64.

    A block with tokens of media is hashed over more than its tokens: these are followed, for each
    medium in turn, by its identifier and the place where it begins, counted from the begin of the
    block, as int32 little-endian (negative if it began before). All other blocks are hashed as in
    `chain_hashes` and `wide_chain_hashes`. `media` are (identifier, offset, length) in the order of
    their offsets, 0..2^31-1. vLLM's rule decides which media a block has, also if some overlap.
    Raises TypeError, ValueError.
    """
    size, before = _integer(block_size, "block_size"), uint64(seed, "seed")
    wide = memoryview(tokens).itemsize == 8
    ids = _buffer(tokens, "tokens", "int64" if wide else "int32")
    if size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    given = _checked(media)
    chain = np.empty(len(ids) // size, dtype=np.uint64)
    first = 0
    for i in range(len(chain)):
        among, first = media_of(given, i * size, (i + 1) * size, first)
        data = before.to_bytes(8, "little") + block_bytes(ids[i * size : (i + 1) * size])
        data += b"".join(name + at.to_bytes(4, "little", signed=True) for name, at in among)
        chain[i] = before = xxhash.xxh3_64_intdigest(data)
    return chain


def media_of(
    media: Sequence[Medium], start: int, end: int, first: int
) -> tuple[list[tuple[bytes, int]], int]:
    """Return the identifiers of the media in the block from `start` to `end`, each with the place
    where it begins, counted from `start`; and the `first` for the next block.

    The rule is vLLM 0.32's (`_gen_mm_extra_hash_keys` in `v1/core/kv_cache_utils.py`).
    """
    among: list[tuple[bytes, int]] = []
    if not media or media[-1].end <= start:
        return among, first
    while first < len(media) and end > media[first].offset:
        medium = media[first]
        if start >= medium.end:
            first += 1
            continue
        among.append((medium.identifier, medium.offset - start))
        if end < medium.end:
            break
        first += 1
    return among, first


def _checked(media: Sequence[tuple[str, int, int]]) -> list[Medium]:
    if not isinstance(media, Sequence):
        raise TypeError(f"media must be a sequence, got {type(media).__name__}")
    checked: list[Medium] = []
    for item in media:
        if not isinstance(item, tuple) or len(item) != 3:
            raise TypeError("media must have tuples (identifier, offset, length)")
        identifier, offset, length = item
        if not isinstance(identifier, str):
            raise TypeError(f"an identifier must be a str, got {type(identifier).__name__}")
        encoded = identifier.encode()
        at = in_range(offset, "an offset", 0, MOST)
        medium = Medium(encoded, at, in_range(length, "a length", 0, MOST))
        if checked and medium.offset < checked[-1].offset:
            raise ValueError("media must be in the order of their offsets")
        checked.append(medium)
    return checked

"""Divides prompts into pieces that can be encoded separately, and takes token ids of known pieces
from a memo.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.wire.memo import PieceMemo, Tokens, array_of

MIN_PIECE_CHARS = 2048  # of a text that is cut
# The patterns of o200k and tekken end a token after line breaks that a letter or a digit follows,
# and before a blank between a letter or a digit and a letter.
_CUT = re.compile(r"(?<=[\r\n])(?=[0-9A-Za-z])|(?<=[0-9A-Za-z])(?= [A-Za-z])")


class Piece(NamedTuple):
    """A part of a prompt, with the function that makes its token ids. Lifetime: call."""

    key: bytes  # equal keys have equal ids; none begins another one
    chars: int
    make: Callable[[], Sequence[int]]  # its ids


def cut(text: str) -> Iterator[str]:
    """Yield a text in parts, divided only where no token of o200k or tekken can span the border.

    Texts that begin alike are divided alike. The ids of one part are computed in one step, during
    which no other Python thread can run.
    """
    start = 0
    while found := _CUT.search(text, start + MIN_PIECE_CHARS):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def ids_of(pieces: Iterable[Piece], memo: PieceMemo, salt: str | None, of: bytes) -> list[Tokens]:
    """Return the token ids of each piece; pieces that are in the memo are not encoded again. `of`
    names the encoder.
    """
    pieces = list(pieces)
    keys = memo.keys((piece.key for piece in pieces), salt, of)
    found: list[Tokens] = []
    new: list[tuple[bytes, Tokens]] = []
    encoded_chars = 0
    for piece, key, ids in zip(pieces, keys, memo.known(keys), strict=True):
        if ids is None:
            ids = array_of(piece.make())
            new.append((key, ids))
            encoded_chars += piece.chars
        found.append(ids)
    memo.keep(new, encoded_chars, sum(piece.chars for piece in pieces) - encoded_chars)
    return found

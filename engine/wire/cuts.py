"""Where a text may be cut so that its pieces encode to the same ids as the whole.

Merges and normalizers cross any place of a text but one: the beginning of an added token that is
looked for before normalization. There the tokenizer itself cuts, and every piece is normalized,
split and encoded alone (tokenizers 0.23, `added_vocabulary.rs`). What could still look across is
left out: tokens that swallow white space before them or match whole words only, and tokenizers
made of parts that we do not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

# All of these look at one piece alone. Metaspace's "first" asks whether its piece begins at 0,
# which no piece after an added token does.
_KNOWN_PARTS = frozenset(
    {
        *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"),
        *("Prepend", "Replace", "Strip", "StripAccents", "ByteLevel", "Sequence"),
        *("BertPreTokenizer", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"),
        *("CharDelimiterSplit", "Whitespace", "WhitespaceSplit", "FixedLength"),
    }
)
_KNOWN_MODELS = frozenset({"BPE", "Unigram", "WordPiece", "WordLevel"})
MIN_PIECE_CHARS = 256  # shorter pieces cost more to keep than to encode


class AddedToken(Protocol):
    """What is asked of an added token (`tokenizers.AddedToken`)."""

    @property
    def content(self) -> str: ...
    @property
    def lstrip(self) -> bool: ...
    @property
    def normalized(self) -> bool: ...
    @property
    def single_word(self) -> bool: ...


class Cuts:
    """Finds the places. Lifetime: process; holds no state."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        """`tokens`: all added tokens looked for before normalization. Raises ValueError where
        no text can be cut at any of them.
        """
        tokens = list(tokens)
        self._cutting = frozenset(token.content for token in tokens if _cuts_before(token))
        if not self._cutting:
            raise ValueError("no added token that a text can be cut at")
        # As the tokenizer finds them: leftmost first, of those the longest.
        contents = sorted({token.content for token in tokens if token.content}, key=len)
        self._found = re.compile("|".join(re.escape(content) for content in reversed(contents)))

    def of(self, text: str) -> list[int]:
        """The ends of the pieces, ascending; the last is the text's length.

        Texts that begin alike are cut alike as far as their last common cut.
        """
        ends: list[int] = []
        next_at = MIN_PIECE_CHARS
        for found in self._found.finditer(text):
            at = found.start()
            if at >= next_at and found.group() in self._cutting:
                ends.append(at)
                next_at = at + MIN_PIECE_CHARS
        ends.append(len(text))
        return ends


def cuts_of(description: Mapping[str, Any], tokens: Iterable[AddedToken]) -> Cuts | None:
    """The cuts of the tokenizer described (the object in `tokenizer.json`) with added `tokens`.

    None where cutting a text could change its ids.
    """
    model = description.get("model") or {}
    if model.get("type", "BPE") not in _KNOWN_MODELS or model.get("dropout"):
        return None
    for part in ("normalizer", "pre_tokenizer"):
        if not _known(description.get(part)):
            return None
    try:
        return Cuts(token for token in tokens if not token.normalized)
    except ValueError:
        return None


def _cuts_before(token: AddedToken) -> bool:
    """Whether a text may be cut before every occurrence of it.

    A word character at its beginning would be a neighbour to single-word tokens before it, and
    white space there could be swallowed by them.
    """
    first = token.content[:1]
    word_or_space = not first or first.isspace() or re.match(r"\w", first) is not None
    return not (token.lstrip or token.single_word or token.normalized or word_or_space)


def _known(part: Any) -> bool:
    if part is None:
        return True
    if not isinstance(part, Mapping) or part.get("type") not in _KNOWN_PARTS:
        return False
    inner = part.get("normalizers") or part.get("pretokenizers") or ()
    return all(_known(one) for one in inner)

"""Where a text may be cut so that its pieces encode to the same ids as the whole.

Merges and normalizers cross any place of a text but one: the beginning of an added token that is
looked for before normalization. There the tokenizer itself cuts, and every piece is normalized,
split and encoded alone (tokenizers 0.23, `added_vocabulary.rs`). What could still look across is
left out: tokens that swallow white space before them or match whole words only, and tokenizers
made of parts that we do not know.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
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
MAX_NESTED = 100  # runs of white space are tokens of up to some dozens
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
        self._found = re.compile(any_of({token.content for token in tokens if token.content}))

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


def any_of(contents: Collection[str], depth: int = 0) -> str:
    """A regular expression of the longest of `contents` at a place, as the tokenizer finds them.

    Beginnings that several share are written once, so that text made of such beginnings takes no
    longer to search than any other. Raises ValueError for more than MAX_NESTED tokens of which
    each begins the next.
    """
    if len(contents) == 1:
        return re.escape(*contents)
    if depth > MAX_NESTED:
        raise ValueError(f"more than {MAX_NESTED} tokens begin one another")
    start = _common_start(min(contents), max(contents))
    branches: dict[str, set[str]] = {}
    for content in contents:
        rest = content[len(start) :]
        branches.setdefault(rest[:1], set()).add(rest)
    optional = "?" if branches.pop("", None) else ""
    inner = "|".join(any_of(branches[first], depth + 1) for first in sorted(branches))
    return f"{re.escape(start)}(?:{inner}){optional}"


def _common_start(one: str, other: str) -> str:
    size = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        size += 1
    return one[:size]


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

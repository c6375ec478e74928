"""Token ids of texts that begin like earlier ones, of which only the new text is encoded.

A text is cut only where no token can cross; the ids of each piece are kept under a digest of all
text up to the piece's end. No token crosses the beginning of an added token that is searched before
normalization.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.wire.tokens import Chat, PromptError, Tokenizer

# All of these look at one piece alone. Metaspace's "first" depends on whether its piece begins at
# 0, which no piece after an added token does.
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
# Looked through, and made an array of, at a time: neither lets another thread run meanwhile.
_WINDOW_CHARS = 1 << 18
_WINDOW_IDS = 1 << 16


class AddedToken(Protocol):
    """The properties of an added token of a tokenizer that this module reads
    (`tokenizers.AddedToken`).
    """

    @property
    def content(self) -> str: ...
    @property
    def lstrip(self) -> bool: ...
    @property
    def normalized(self) -> bool: ...
    @property
    def single_word(self) -> bool: ...


class Cuts:
    """Finds the positions at which a text may be cut. Lifetime: process; holds no state."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        """Make the cutter for a tokenizer; `tokens` are all added tokens that are searched before
        normalization. Raises ValueError if no text can be cut at any of them.
        """
        tokens = list(tokens)
        self._cutting = frozenset(token.content for token in tokens if _cuts_before(token))
        if not self._cutting:
            raise ValueError("no added token that a text can be cut at")
        contents = {token.content for token in tokens if token.content}
        self._found = re.compile(any_of(contents))
        self._longest = max(map(len, contents))

    def of(self, text: str) -> list[int]:
        """Return the ends of a text's pieces, ascending; the last is the text's length. Texts that
        begin alike are cut alike up to their last common cut.
        """
        ends: list[int] = []
        next_at = MIN_PIECE_CHARS
        for at, found in self._tokens_of(text):
            if at >= next_at and found in self._cutting:
                ends.append(at)
                next_at = at + MIN_PIECE_CHARS
        ends.append(len(text))
        return ends

    def _tokens_of(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield each added token in the text in turn, with its position."""
        start = 0
        for end in range(_WINDOW_CHARS, len(text) + _WINDOW_CHARS, _WINDOW_CHARS):
            # A token may begin in this window and end in the next one.
            for found in self._found.finditer(text, start, end + self._longest - 1):
                if found.start() >= end:
                    break
                start = found.end()
                yield found.start(), found.group()
            start = max(start, end)


def cuts_of(description: Mapping[str, Any], tokens: Iterable[AddedToken]) -> Cuts | None:
    """Return the cuts of the tokenizer that `tokenizer.json` describes, with the added `tokens`.

    Return None if cutting a text could change its ids.
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
    """Return a regular expression of the longest of `contents` at a position, as the tokenizer
    finds them.

    Common beginnings are written once, so that text made of them takes no longer to search than any
    other. Raises ValueError if more than MAX_NESTED tokens each begin the next.
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
    """Return whether a text may be cut before every occurrence of this token.

    A word character at its beginning would be a neighbour of single-word tokens before it, and such
    tokens could swallow white space there.
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


Tokens = npt.NDArray[np.int32]

_ENTRY_BYTES = 256  # of a piece beside its ids: digest, objects, table
_DIGEST_BYTES = 16


class Cutting(Protocol):
    """A tokenizer whose texts may be cut and encoded in pieces."""

    @property
    def cuts(self) -> Cuts | None:
        """The places at which texts may be cut; None if there are none."""

    @property
    def framing(self) -> tuple[list[int], list[int]]:
        """Ids put before and after a text that is encoded with special tokens."""


def array_of(ids: Sequence[int]) -> Tokens:
    """Return ids as an array, made in steps between which other threads run."""
    array = np.empty(len(ids), dtype=np.int32)
    for at in range(0, len(ids), _WINDOW_IDS):
        array[at : at + _WINDOW_IDS] = ids[at : at + _WINDOW_IDS]
    return array


class PieceMemo:
    """The token ids of prompts' pieces by digests; it keeps no text. Lifetime: process.

    It takes at most `max_bytes`: the least recently used pieces leave first. Several threads may
    use it at once.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._secret = secrets.token_bytes(32)
        self._pieces: OrderedDict[bytes, Tokens] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0  # held now
        self.reused_chars = 0  # of texts whose ids were known
        self.encoded_chars = 0

    def keys(self, pieces: Iterable[bytes], salt: str | None, of: bytes = b"") -> list[bytes]:
        """Return a digest for each piece, which covers all pieces up to its end. `of` keeps the
        prompts of one encoder apart from those of another, and `salt` those of different tenants.
        """
        name = b"" if salt is None else salt.encode("utf-8", "surrogatepass")
        # Its length keeps the salt apart from the text.
        begun = len(name).to_bytes(4, "little") + name
        digest = hashlib.blake2b(
            begun, digest_size=_DIGEST_BYTES, key=self._secret, person=of.ljust(16, b"\0")
        )
        keys = []
        for piece in pieces:
            digest.update(piece)
            keys.append(digest.digest())
        return keys

    def known(self, keys: Iterable[bytes]) -> list[Tokens | None]:
        """Return the ids of each piece, or None for a piece that is not kept."""
        with self._lock:
            found = [(key, self._pieces.get(key)) for key in keys]
            for key, ids in found:
                if ids is not None:
                    self._pieces.move_to_end(key)
        return [ids for _, ids in found]

    def keep(
        self, new: Iterable[tuple[bytes, Tokens]], encoded_chars: int, reused_chars: int
    ) -> None:
        """Keep the ids of new pieces, and count how many characters of a prompt were encoded and
        how many were reused.
        """
        with self._lock:
            self.encoded_chars += encoded_chars
            self.reused_chars += reused_chars
            for key, ids in new:
                if key in self._pieces:  # another thread was as fast
                    continue
                ids.setflags(write=False)
                self._pieces[key] = ids
                self.bytes += ids.nbytes + _ENTRY_BYTES
            while self.bytes > self.max_bytes:
                _, dropped = self._pieces.popitem(last=False)
                self.bytes -= dropped.nbytes + _ENTRY_BYTES


class MemoEncoder:
    """Encodes prompts through a memo of earlier pieces, which may be shared with other encoders.

    Lifetime: process. Several threads may use it at once. If the tokenizer's texts cannot be cut
    (`cutting` is None, or knows no cuts), or the memo has 0 bytes, it only calls the tokenizer.
    Texts of more than `max_chars` are rejected.
    """

    cuts_chats = True  # engines that render by a template obey `truncate_prompt_tokens`

    def __init__(
        self,
        tokenizer: Tokenizer,
        cutting: Cutting | None,
        memo: int | PieceMemo,
        max_chars: int | None = None,
    ) -> None:
        self.memo = PieceMemo(memo) if isinstance(memo, int) else memo
        self._max_chars = max_chars
        self._tokenizer = tokenizer
        self._cuts = cutting.cuts if cutting is not None and self.memo.max_bytes > 0 else None
        before, after = cutting.framing if cutting is not None else ([], [])
        self._before = np.array(before, dtype=np.int32)
        self._after = np.array(after, dtype=np.int32)

    def encode(self, text: str, add_special_tokens: bool = True, salt: str | None = None) -> Tokens:
        """Return the ids of a plain prompt, int32, equal to the tokenizer's own. Raises
        PromptError.
        """
        if self._max_chars is not None and len(text) > self._max_chars:
            raise PromptError(f"the prompt has more than {self._max_chars} characters")
        if self._cuts is None:
            return array_of(self._tokenizer.encode(text, add_special_tokens))
        pieces = self._ids(text, self._cuts, salt)
        if add_special_tokens:
            pieces = [self._before, *pieces, self._after]
        return np.concatenate(pieces) if pieces else self._before[:0]

    def encode_chat(self, chat: Chat, now_s: float, salt: str | None = None) -> Tokens:
        """Return the ids of a chat's prompt, int32. Raises PromptError."""
        if self._cuts is None and self._max_chars is None:
            return array_of(self._tokenizer.encode_chat(chat, now_s))
        text = self._tokenizer.render(chat, now_s)
        return self.encode(text, chat.add_special_tokens, salt)

    def _ids(self, text: str, cuts: Cuts, salt: str | None) -> list[Tokens]:
        """Return the ids of each of the text's pieces."""
        ends = cuts.of(text)
        spans = list(zip([0, *ends], ends, strict=False))
        keys = self.memo.keys(
            (text[start:end].encode("utf-8", "surrogatepass") for start, end in spans), salt
        )
        pieces: list[Tokens] = []
        new: list[tuple[bytes, Tokens]] = []
        encoded_chars = 0
        for (start, end), key, ids in zip(spans, keys, self.memo.known(keys), strict=True):
            if ids is None:
                ids = array_of(self._tokenizer.encode(text[start:end], False))
                new.append((key, ids))
                encoded_chars += end - start
            pieces.append(ids)
        self.memo.keep(new, encoded_chars, len(text) - encoded_chars)
        return pieces

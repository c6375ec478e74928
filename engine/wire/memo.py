"""Ids of texts that begin as earlier ones did: only what is new is encoded.

A text is cut where no token can reach across (`engine.wire.cuts`); the ids of each piece are kept
under a digest of all text up to the piece's end. So the next turn of a chat costs its rendering,
one pass of hashing, and the encoding of the new messages. No text is kept.

A kept piece is found only by who brings the same text from the beginning, and the same salt: it
tells by its time no more than the engine's own prefix cache does. The digests are keyed with a
secret of the process, since ids may be sent on in the text's place: nobody can make two texts
that are taken for each other.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.wire.cuts import Cuts
from engine.wire.tokens import Chat, Tokenizer

Tokens = npt.NDArray[np.int32]

_ENTRY_BYTES = 256  # of a piece beside its ids: digest, objects, table
_DIGEST_BYTES = 16


class Cutting(Protocol):
    """A tokenizer whose texts may be cut."""

    @property
    def cuts(self) -> Cuts | None:
        """None: at no place."""
        ...

    @property
    def framing(self) -> tuple[list[int], list[int]]:
        """Ids put before and after a text that is encoded with special tokens."""
        ...


class MemoEncoder:
    """Encodes through a memo of at most `max_bytes`, the least recently used pieces leaving first.

    Lifetime: process. Safe to call from several threads. Where the tokenizer's texts cannot be
    cut (`cutting` is None, or knows no cuts), or with `max_bytes` 0, it is the bare tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, cutting: Cutting | None, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._cuts = cutting.cuts if cutting is not None and max_bytes > 0 else None
        before, after = cutting.framing if cutting is not None else ([], [])
        self._before = np.array(before, dtype=np.int32)
        self._after = np.array(after, dtype=np.int32)
        self._max_bytes = max_bytes
        self._key = secrets.token_bytes(32)
        self._pieces: OrderedDict[bytes, Tokens] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0  # held now
        self.reused_chars = 0  # of texts whose ids were known
        self.encoded_chars = 0

    def encode(self, text: str, add_special_tokens: bool = True, salt: str | None = None) -> Tokens:
        """Ids of a plain prompt, int32; equal to the tokenizer's own. Raises PromptError."""
        if self._cuts is None:
            return np.array(self._tokenizer.encode(text, add_special_tokens), dtype=np.int32)
        pieces = self._ids(text, self._cuts, salt)
        if add_special_tokens:
            pieces = [self._before, *pieces, self._after]
        return np.concatenate(pieces) if pieces else self._before[:0]

    def encode_chat(self, chat: Chat, now_s: float, salt: str | None = None) -> Tokens:
        """The prompt of a chat as ids, int32. Raises PromptError."""
        if self._cuts is None:
            return np.array(self._tokenizer.encode_chat(chat, now_s), dtype=np.int32)
        text = self._tokenizer.render(chat, now_s)
        return self.encode(text, chat.add_special_tokens, salt)

    def _ids(self, text: str, cuts: Cuts, salt: str | None) -> list[Tokens]:
        """The ids of the text's pieces."""
        ends = cuts.of(text)
        keys = self._keys(text, ends, salt)
        with self._lock:
            known = [self._pieces.get(key) for key in keys]
            for key, ids in zip(keys, known, strict=True):
                if ids is not None:
                    self._pieces.move_to_end(key)
        pieces: list[Tokens] = []
        new: list[tuple[bytes, Tokens]] = []
        start = encoded_chars = 0
        for key, ids, end in zip(keys, known, ends, strict=True):
            if ids is None:
                ids = np.array(self._tokenizer.encode(text[start:end], False), dtype=np.int32)
                ids.setflags(write=False)
                new.append((key, ids))
                encoded_chars += end - start
            pieces.append(ids)
            start = end
        self._keep(new, encoded_chars, len(text) - encoded_chars)
        return pieces

    def _keys(self, text: str, ends: Iterable[int], salt: str | None) -> list[bytes]:
        """Digests of the text up to each of its `ends`."""
        name = b"" if salt is None else salt.encode("utf-8", "surrogatepass")
        # Its length keeps the salt apart from the text.
        begun = len(name).to_bytes(4, "little") + name
        digest = hashlib.blake2b(begun, digest_size=_DIGEST_BYTES, key=self._key)
        keys = []
        start = 0
        for end in ends:
            digest.update(text[start:end].encode("utf-8", "surrogatepass"))
            keys.append(digest.digest())
            start = end
        return keys

    def _keep(self, new: list[tuple[bytes, Tokens]], encoded_chars: int, reused_chars: int) -> None:
        with self._lock:
            self.encoded_chars += encoded_chars
            self.reused_chars += reused_chars
            for key, ids in new:
                if key in self._pieces:  # another thread was as fast
                    continue
                self._pieces[key] = ids
                self.bytes += ids.nbytes + _ENTRY_BYTES
            while self.bytes > self._max_bytes:
                _, dropped = self._pieces.popitem(last=False)
                self.bytes -= dropped.nbytes + _ENTRY_BYTES

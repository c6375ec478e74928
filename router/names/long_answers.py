"""Replaces the model's name in a JSON answer of any length, without keeping the answer."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec

_KEPT_BYTES = 65_536  # of a key or a model's name; a longer one is passed on unchanged
_DEEP = re.compile(rb'["{}\[\]]')
_FLAT = re.compile(rb'["{}\[\],]')
_STRING_REST = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_OPENING, _CLOSING = b"{[", b"}]"


class LongAnswer:
    """Replaces the value of the first key `model` of a JSON object. Lifetime: reply.

    A value that is not a string stays, and so does each `model` inside the object's values. Only a
    key and the model's name are ever kept in memory.
    """

    def __init__(self, value: bytes) -> None:
        """Make an editor that writes `value`, a name as JSON."""
        self._value = value
        self._kept = b""
        self._done = False
        self._depth = 0
        self._in_string = False  # within a string that does not matter
        self._key_next = False  # the next string of the outermost object is a key

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the answer, and return the edited bytes that are complete."""
        if self._done:
            return data
        text, self._kept = self._kept + data, b""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._skip_string(text, at)
                continue
            found = (_FLAT if self._depth <= 1 else _DEEP).search(text, at)
            if found is None:
                return self._begins(text, at)
            at = found.end()
            char = text[found.start()]
            if char == ord('"'):
                if self._depth == 1 and self._key_next:
                    end = self._key(text, found.start())
                    if end is None:
                        return self._wait(text, found.start())
                    if self._done:
                        return text[: self._from] + self._value + text[end:]
                    at = end
                else:
                    self._in_string = True
            elif char == ord(","):
                self._key_next = self._depth == 1
            elif not self._nest(char):
                self._done = True  # no object, or all of it was seen
                return text
        return text[: len(text) - len(self._kept)]

    def flush(self) -> bytes:
        """Return the bytes that are still kept when the answer has ended."""
        kept, self._kept = self._kept, b""
        return kept

    _from = 0  # where the model's value begins

    def _begins(self, text: bytes, at: int) -> bytes:
        """Return `text` unchanged, and note if it cannot be the beginning of an object."""
        if self._depth == 0 and text[at:].strip(b" \t\r\n"):
            self._done = True
        return text

    def _nest(self, char: int) -> bool:
        """Count an opening or closing bracket. Return False if the outermost value is not an
        object, or has ended.
        """
        if char in _OPENING:
            if self._depth == 0:
                if char != ord("{"):
                    return False
                self._key_next = True
            self._depth += 1
            return True
        self._depth -= 1
        self._key_next = False
        return self._depth > 0

    def _skip_string(self, text: bytes, at: int) -> int:
        """Return the position after a string that need not be read."""
        found = _STRING_REST.match(text, at)
        assert found is not None, "it matches nothing, too"
        end = found.end()
        if end == len(text):
            return end
        if text[end] == ord('"'):
            self._in_string = False
            return end + 1
        self._kept = text[end:]  # a backslash, whose next character has not arrived yet
        return len(text)

    def _key(self, text: bytes, begin: int) -> int | None:
        """Read a key and, if it is `model`, its value. Return the position after the key or the
        value; None if more bytes are needed.

        Once the name was found, `_from` is its position, and the rest of the answer is passed on
        unchanged.
        """
        key = _STRING.match(text, begin)
        if key is None:
            return None
        if not _is_model(key[0]):
            self._key_next = False
            return key.end()
        colon = _COLON.match(text, key.end())
        if colon is None or colon.end() == len(text):
            return None
        if text[colon.end()] != ord('"'):  # such as null: there is no name to be replaced
            self._key_next = False
            return key.end()
        value = _STRING.match(text, colon.end())
        if value is None:
            return None
        self._done, self._from = True, colon.end()
        return value.end()

    def _wait(self, text: bytes, begin: int) -> bytes:
        """Keep the bytes from position `begin` on until more bytes arrive, and return the bytes
        before them.
        """
        if len(text) - begin > _KEPT_BYTES:
            self._done = True
            return text
        self._kept = text[begin:]
        return text[:begin]


def _is_model(key: bytes) -> bool:
    if key == b'"model"':
        return True
    if b"\\" not in key:
        return False
    with suppress(msgspec.DecodeError, UnicodeError):
        return bool(msgspec.json.decode(key) == "model")
    return False

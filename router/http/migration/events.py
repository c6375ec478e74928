"""Server-sent events: whole ones out of bytes, and what is read of each. No I/O."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

_BREAK = re.compile(rb"\r?\n\r?\n")
_BREAK_BYTES = 4
_NOTHING = (b"null", b"[]", b'""')
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Splitter:
    """Cuts a stream at the ends of its events. Lifetime: one worker's reply."""

    def __init__(self, limit_bytes: int) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._limit_bytes = limit_bytes

    @property
    def full(self) -> bool:
        """The event under way is longer than any should be."""
        return len(self._buffer) > self._limit_bytes

    def feed(self, payload: bytes) -> list[bytes]:
        """The events that `payload` completes, each with the empty line that ends it."""
        buffer = self._buffer
        if not buffer and 0 <= payload.find(b"\n\n") == len(payload) - 2 and b"\r" not in payload:
            return [payload]  # one event, as nearly always
        buffer += payload
        events = []
        start = 0
        for found in _BREAK.finditer(buffer, self._searched):
            events.append(bytes(buffer[start : found.end()]))
            start = found.end()
        if start:
            del buffer[:start]
        self._searched = max(len(buffer) - _BREAK_BYTES + 1, 0)
        return events

    def rest(self) -> bytes:
        """What has come of an event that is not whole; it is not kept any longer."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest


class Choice(msgspec.Struct):
    """One choice of a chunk, of a completion or of a chat."""

    index: int = 0
    text: str | None = None
    delta: dict[str, msgspec.Raw] | None = None
    finish_reason: str | None = None
    token_ids: list[_Token] | None = None
    prompt_token_ids: list[_Token] | None = None

    @property
    def says(self) -> bool:
        """It has text for the reader."""
        if self.delta is None:
            return bool(self.text)
        return "content" in self.delta and bytes(self.delta["content"]) not in _NOTHING

    @property
    def parsed(self) -> bool:
        """A parser of the engine took part of the answer for something else than its text."""
        if self.delta is None:
            return False
        if len(self.delta) == 1 and "content" in self.delta:
            return False
        other = self.delta.keys() - {"role", "content"}
        return any(bytes(self.delta[name]) not in _NOTHING for name in other)

    @property
    def opens(self) -> bool:
        """It says that the assistant speaks."""
        return self.delta is not None and "role" in self.delta


class Chunk(msgspec.Struct):
    """What is read of an event's JSON; the bytes themselves go on."""

    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: list[_Token] | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def error_code(self) -> int | None:
        """The HTTP status in vLLM's and OpenAI's shape of an error; None where it has none."""
        error = _value(self.error)
        code = error.get("code") if isinstance(error, dict) else None
        return code if isinstance(code, int) else None

    @property
    def answer_tokens(self) -> int | None:
        """How long the answer is by its usage; None where that is not said."""
        usage = _value(self.usage)
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return tokens if isinstance(tokens, int) else None


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # strings in it are no text


_CHUNK = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk | None:
    """The chunk in an event's data; None for what is none."""
    try:
        return _CHUNK.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None

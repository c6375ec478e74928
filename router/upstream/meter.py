"""Counts the events and reads the token usage in a reply's body while it is relayed,
without I/O.
"""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Annotated

import msgspec

from router.http.reply import Usage

# Quotes inside JSON strings are escaped, so this can only be a key; `"usage": null`, which
# engines put on every event but the last, does not match.
_USAGE = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(?=\{)')
_META = re.compile(rb'"meta_info"[ \t\r\n]*:[ \t\r\n]*(?=\{)')  # of SGLang's own API
_EVENT = b"\ndata:"
_BEGIN_BYTES = 4_096  # kept if the beginning has counts that the end lacks

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    # OpenAI's responses and Anthropic's messages (API references, 2025). In the latter
    # `input_tokens` are only those that were neither read from a cache nor written to one.
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None
    cached_tokens: _Count | None = None  # SGLang's `meta_info`

    def usage(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details else self.cache_read_input_tokens
        prompt, completion = self.prompt_tokens, self.completion_tokens
        if prompt is None and self.input_tokens is not None:
            beside = (self.cache_read_input_tokens, self.cache_creation_input_tokens)
            prompt = self.input_tokens + sum(n or 0 for n in beside)
        return Usage(
            prompt,
            self.output_tokens if completion is None else completion,
            self.cached_tokens if cached is None else cached,
        )


_USAGE_DECODER = msgspec.json.Decoder(_Usage)
_MAX_USAGE_OBJECTS = 4  # JSON objects that are read: an engine's usage and the objects in it


class Meter:
    """Counts the events in one reply's body, and keeps its end. Lifetime: request."""

    def __init__(
        self, event_stream: bool, tail_bytes: int, mark: bytes | None = None, ends: bool = False
    ) -> None:
        """Start before the first byte. `mark` is counted instead of `data:` lines, if it is not
        None. `ends` True means that the beginning and the end are kept of a body that is not an
        event stream.
        """
        self.events = 0
        self._event_stream = event_stream
        self._mark = mark or _EVENT
        self._begin: bytes | None = b"" if event_stream and mark else None
        self._first: bytes | None = b"" if ends and not event_stream else None
        self._tail_bytes = tail_bytes
        self._tail: deque[bytes] = deque()
        self._kept_bytes = 0
        self._dropped = False
        self._carry = b"\n"  # the end of the last payload: a line may be split anywhere

    @property
    def begun(self) -> bool:
        """True if tokens of the answer have arrived: with the first byte, or with the first mark if
        there is one.
        """
        return self._begin is None or self.events > 0

    def feed(self, payload: bytes) -> None:
        """Process the next bytes of the body, without chunk framing."""
        if self._event_stream:
            joined = self._carry + payload
            self.events += joined.count(self._mark)
            self._carry = joined[1 - len(self._mark) :]
            if self._begin is not None and len(self._begin) < _BEGIN_BYTES:
                self._begin += payload[:_BEGIN_BYTES]
        if self._first is not None and len(self._first) < _BEGIN_BYTES:
            self._first += payload[:_BEGIN_BYTES]
        self._tail.append(payload)
        self._kept_bytes += len(payload)
        while self._kept_bytes - len(self._tail[0]) >= self._tail_bytes:
            self._kept_bytes -= len(self._tail.popleft())
            self._dropped = True

    @property
    def whole(self) -> bool:
        """True if the whole body was kept."""
        return not self._dropped and self._kept_bytes <= self._tail_bytes

    @property
    def kept(self) -> bytes:
        """The kept parts of the body: its beginning and its end, with a zero byte between them."""
        tail = self.tail
        return tail if self.whole or self._first is None else b"%b\0%b" % (self._first, tail)

    @property
    def tail(self) -> bytes:
        """The end of the body, as far as it was kept."""
        return b"".join(self._tail)[-self._tail_bytes :]

    def usage(self) -> Usage | None:
        """Return the last usage object in the kept end of the body; None if there is none or it is
        malformed.
        """
        tail = self.tail
        keys = list(_USAGE.finditer(tail)) or list(_META.finditer(tail))
        usage = usage_in(tail[keys[-1].end() :]) if keys else None
        if self._begin is None or usage is None or usage.prompt_tokens is not None:
            return usage
        first = _USAGE.search(self._begin)
        told = usage_in(self._begin[first.end() :]) if first else None
        if told is None:
            return usage
        return Usage(told.prompt_tokens, usage.completion_tokens, told.cached_tokens)


def usage_in(text: bytes) -> Usage | None:
    """Return the usage object at the beginning of `text`; None if it is malformed or empty."""
    if not text:
        return None
    usage = _whole(text)
    if usage is None:
        try:
            value, _ = json.JSONDecoder().raw_decode(text.decode("utf-8", "replace"))
            usage = msgspec.convert(value, _Usage)
        except (ValueError, RecursionError):
            # The counts are the worker's courtesy: without them the caller falls back on its own.
            return None
    return usage.usage()


def _whole(text: bytes) -> _Usage | None:
    """Return the usage object if it ends at the first closing brace that matches its first brace,
    otherwise None.

    It does so unless its strings contain braces. This takes a tenth of the time of a search for the
    end of the JSON.
    """
    end = 0
    for _ in range(_MAX_USAGE_OBJECTS):
        end = text.find(b"}", end) + 1
        if not end:
            return None
        if text.count(b"{", 0, end) == text.count(b"}", 0, end):
            break
    try:
        return _USAGE_DECODER.decode(text[:end])
    except ValueError:
        return None

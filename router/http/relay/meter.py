"""What is read of a body on its way through: how many events, and the usage at its end. No I/O."""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Annotated

import msgspec

from router.http.relay.reply import Usage

# Quotes inside JSON strings are escaped, so this can only be a key; `"usage": null`, which
# engines put on every event but the last, does not match.
_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_EVENT = b"\ndata:"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class Meter:
    """Counts events and keeps the end of one body. Lifetime: request."""

    def __init__(self, event_stream: bool, tail_bytes: int) -> None:
        self.events = 0
        self._event_stream = event_stream
        self._tail_bytes = tail_bytes
        self._tail: deque[bytes] = deque()
        self._kept_bytes = 0
        self._carry = b"\n"  # the end of the last payload: a line may be split anywhere

    def feed(self, payload: bytes) -> None:
        """Note the next bytes of the body, free of chunk framing."""
        if self._event_stream:
            joined = self._carry + payload
            self.events += joined.count(_EVENT)
            self._carry = joined[1 - len(_EVENT) :]
        self._tail.append(payload)
        self._kept_bytes += len(payload)
        while self._kept_bytes - len(self._tail[0]) >= self._tail_bytes:
            self._kept_bytes -= len(self._tail.popleft())

    def usage(self) -> Usage | None:
        """The last usage object within the kept end; None when there is none that can be read."""
        text = b"".join(self._tail)[-self._tail_bytes :].decode("utf-8", "replace")
        keys = list(_USAGE.finditer(text))
        if not keys:
            return None
        try:
            value, _ = json.JSONDecoder().raw_decode(text, keys[-1].end())
            usage = msgspec.convert(value, _Usage)
        except (ValueError, RecursionError):
            # The counts are the worker's courtesy: without them the caller falls back on its own.
            return None
        details = usage.prompt_tokens_details
        cached_tokens = details.cached_tokens if details else None
        return Usage(usage.prompt_tokens, usage.completion_tokens, cached_tokens)

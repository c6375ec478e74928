"""Reads a streamed completion as bytes come: counts tokens, times them, finds the usage. No I/O."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]"
TAIL_BYTES = 8192  # room for the last events: usage and the end mark


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


class StreamMeter:
    """Token times and the end of one server-sent event stream. Lifetime: request.

    Events are counted, not parsed: one `data:` line is one token, which holds for engines that
    send each token as it is made. Where the usage is sent, its token count is believed instead.
    """

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gap_max_s = 0.0
        self.events = 0
        self._tail = b""
        self._carry = b""  # the start of a line that the next read will finish

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes the next bytes of the body, read at `now_s`."""
        joined = self._carry + data
        fresh = joined.count(b"data: ")
        self._carry = joined[-5:]  # one byte short of the mark, so none is counted twice
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if not fresh:
            return
        self.events += fresh
        if self.first_s is None:
            self.first_s = now_s
        elif not data.startswith(DONE):
            self.gap_max_s = max(self.gap_max_s, now_s - self.last_s)
        self.last_s = now_s

    def finish(self) -> tuple[int, int | None, str | None]:
        """(output tokens, cached tokens or None, error or None), to be asked at the end."""
        lines = [line for line in self._tail.split(b"\n") if line.startswith(b"data: ")]
        if not lines or not lines[-1].startswith(DONE):
            return self.events, None, "the stream ended before `data: [DONE]`"
        tokens, cached = self.events - 1, None
        # The first line of the tail may be cut at its start, but then it does not match.
        for line in lines[-3:-1]:
            try:
                event = msgspec.json.decode(line[6:], type=_Event)
            except msgspec.DecodeError as error:
                return tokens, None, f"an event is not JSON: {error}"
            if event.error:
                return tokens, None, f"error in the stream: {bytes(event.error)[:200]!r}"
            if event.usage is not None:
                tokens = event.usage.completion_tokens
                details = event.usage.prompt_tokens_details
                cached = (details.cached_tokens or 0) if details else None
        return tokens, cached, None if tokens > 0 else "the answer had no token"

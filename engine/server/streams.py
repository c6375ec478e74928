"""Answers as server-sent events: tokens in, OpenAI-shaped events out.

A streamed token is one event, joined from prepared bytes and written straight to the transport:
with hundreds of streams, this is where a timed worker spends its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import isfinite

import msgspec

from engine.server.answers import Answer, Choice
from engine.server.errors import ApiError, error_body
from engine.server.logprobs import entry, shaped
from engine.server.runners import Logprobs

MAX_UNSENT_BYTES = 4 << 20  # a client that leaves more than this unread is cut off
LINGER_S = 5.0  # for a client to read the event that says why its stream ends

_json = msgspec.json.Encoder().encode


class StreamAnswer(Answer):
    """An answer sent as server-sent events. Lifetime: HTTP request.

    `chunked`: frame each write as a chunk of HTTP/1.1; the last, empty chunk is the server's.
    `on_slow` is called when the client has left too much unread; the connection is cut then.
    """

    __slots__ = (
        "_chunked", "_early", "_include_usage", "_on_slow", "_prefix", "_transport", "begun",
    )  # fmt: skip

    def attach(
        self,
        transport: asyncio.Transport,
        chunked: bool,
        include_usage: bool,
        on_slow: Callable[[], None],
    ) -> None:
        """Say where the bytes go; they are kept back until `open`."""
        self._early: list[bytes] | None = []
        self.begun = asyncio.Event()  # the first token is there
        self._transport = transport
        self._chunked = chunked
        self._include_usage = include_usage
        self._on_slow = on_slow
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        self._prefix = b"data: " + _json(self.head(name))[:-1]

    def open(self) -> None:
        """The response's head is on its way: events may follow it."""
        early, self._early = self._early, None
        if early:
            self._write(b"".join(early))

    @property
    def has_deadline(self) -> bool:
        """The answer is worth nothing after some time."""
        return any(isfinite(choice.request.deadline_s) for choice in self.choices)

    async def first_or_done(self) -> None:
        """Until there is something to tell; raises ApiError where there will not be."""
        first = asyncio.ensure_future(self.begun.wait())
        try:
            await asyncio.wait((first, self.done), return_when=asyncio.FIRST_COMPLETED)
        finally:
            first.cancel()
        if not self.begun.is_set():
            await self.done

    def tell(self, error: ApiError) -> None:
        """Tell why no more will come."""
        self._write(self.error_event(error))

    def close_with(self, error: ApiError) -> None:
        """Tell why no more will come, and end what must not look complete."""
        self.tell(error)
        # Closed and not aborted: what is unsent, the event too, still goes out.
        self._transport.close()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def error_event(self, error: ApiError) -> bytes:
        """The event that tells of `error`, in vLLM's form."""
        return b"data: %b\n\n" % error_body(error.status, error.message, error.param)

    def text_of(self, choice: Choice, token: int, finished: str | None) -> str:
        return choice.take(token, finished)

    def on_token(
        self,
        choice: Choice,
        token: int,
        text: str,
        finished: str | None,
        logprobs: Logprobs | None,
    ) -> None:
        said = b"null"
        if logprobs is not None:
            one = entry(self.tokenizer, token, logprobs)
            said = _json(shaped([one], self.kind, choice.logprob_chars))
            choice.logprob_chars += len(one["token"])
        reason = b'"%b"' % finished.encode() if finished else b"null"
        first = len(choice.request.output) == 1
        ids = b',"token_ids":[%d]' % token if self.return_token_ids else b""
        if ids and first and self.kind == "completion":
            ids = b',"prompt_token_ids":%b%b' % (_json(choice.request.prompt.tolist()), ids)
        shape = b'{"content":%b}' if self.kind == "chat" else b"%b"
        key = b'"delta":' if self.kind == "chat" else b'"text":'
        event = b'%b,"choices":[{"index":%d,%b%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self._prefix,
            choice.index,
            key,
            shape % _json(text),
            said,
            reason,
            ids,
        )
        if first and self.kind == "chat":
            event = self._opening(choice) + event
        if finished and self.unfinished == 1:
            event += self._closing()
        self._write(event)
        self._count(finished)

    def _opening(self, choice: Choice) -> bytes:
        """What precedes a chat's first token: whose turn it is, the prompt's ids if asked."""
        delta = {"role": "assistant", "content": ""}
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = b""
        if self.return_token_ids:
            ids = b',"prompt_token_ids":' + _json(choice.request.prompt.tolist())
        return b'%b,"choices":[%b]%b}\n\n' % (self._prefix, _json(part), ids)

    def _closing(self) -> bytes:
        """What follows the last token of the last choice."""
        usage = b""
        if self._include_usage:
            usage = b'%b,"choices":[],"usage":%b}\n\n' % (self._prefix, _json(self.usage()))
        return usage + b"data: [DONE]\n\n"

    def _write(self, data: bytes) -> None:
        self.begun.set()
        if self._early is not None:
            self._early.append(data)
            return
        transport = self._transport
        if transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._on_slow()
            transport.abort()

"""Answers in the making: tokens in, OpenAI-shaped bytes out, streamed or whole.

A streamed token is one server-sent event, joined from prepared bytes and written straight to
the transport: with hundreds of streams, this is where a timed worker spends its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from engine.request import Request
from engine.server.errors import ApiError
from engine.wire.tokens import Tokenizer

MAX_UNSENT_BYTES = 4 << 20  # a client that leaves more than this unread is cut off

Kind = Literal["completion", "chat"]
_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Choice:
    """One sequence of an answer. Lifetime: request."""

    request: Request
    index: int
    decode: Callable[[int], str]
    submitted_s: float
    last_token_s: float = 0.0  # 0 before the first token


@dataclass(slots=True)
class Answer:
    """What all answers share. Lifetime: HTTP request; `done` is set once, by the last token."""

    kind: Kind
    answer_id: str
    model: str
    created_s: int
    tokenizer: Tokenizer
    return_token_ids: bool
    choices: list[Choice] = field(default_factory=list)
    unfinished: int = 0
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def on_token(self, choice: Choice, token: int, finished: str | None) -> None:
        """Take in one token; `finished` says why it was the choice's last one."""
        if finished is not None:
            self.unfinished -= 1
            if not self.unfinished and not self.done.done():
                self.done.set_result(None)

    def cut(self) -> None:
        """End the wait for tokens that will not come: the worker shuts down."""
        if not self.done.done():
            self.done.set_exception(ApiError(503, "this worker is shutting down"))

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage over all choices."""
        requests = [choice.request for choice in self.choices]
        prompt_tokens = sum(request.prompt_tokens for request in requests)
        completion_tokens = sum(len(request.output) for request in requests)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(request.cached_tokens for request in requests)
            },
        }

    def head(self, object_name: str) -> dict[str, Any]:
        """The fields that every object and chunk starts with."""
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created_s,
            "model": self.model,
        }

    def body(self) -> bytes:
        """The whole answer as one JSON object, when it is done."""
        is_chat = self.kind == "chat"
        answer = self.head("chat.completion" if is_chat else "text_completion")
        answer["choices"] = [self._whole(choice) for choice in self.choices]
        answer["usage"] = self.usage()
        if is_chat and self.return_token_ids:
            answer["prompt_token_ids"] = self.choices[0].request.prompt.tolist()
        return _json(answer)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        request = choice.request
        text = self.tokenizer.decode(request.output)
        part: dict[str, Any] = {"index": choice.index}
        if self.kind == "chat":
            part["message"] = {"role": "assistant", "content": text}
        else:
            part["text"] = text
        part |= {"logprobs": None, "finish_reason": request.finish_reason}
        if self.return_token_ids:
            part["token_ids"] = request.output
            if self.kind == "completion":
                part["prompt_token_ids"] = request.prompt.tolist()
        return part


class StreamAnswer(Answer):
    """An answer sent as server-sent events. Lifetime: HTTP request.

    `chunked`: frame each write as a chunk of HTTP/1.1; the last, empty chunk is the server's.
    `on_slow` is called when the client has left too much unread; the connection is cut then.
    """

    __slots__ = ("_chunked", "_early", "_include_usage", "_on_slow", "_prefix", "_transport")

    def attach(
        self,
        transport: asyncio.Transport,
        chunked: bool,
        include_usage: bool,
        on_slow: Callable[[], None],
    ) -> None:
        """Say where the bytes go; they are kept back until `open`."""
        self._early: list[bytes] | None = []
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

    def on_token(self, choice: Choice, token: int, finished: str | None) -> None:
        text = _json(choice.decode(token))
        reason = b'"%b"' % finished.encode() if finished else b"null"
        ids = b',"token_ids":[%d]' % token if self.return_token_ids else b""
        shape = b'{"content":%b}' if self.kind == "chat" else b"%b"
        key = b'"delta":' if self.kind == "chat" else b'"text":'
        event = b'%b,"choices":[{"index":%d,%b%b,"logprobs":null,"finish_reason":%b%b}]}\n\n' % (
            self._prefix,
            choice.index,
            key,
            shape % text,
            reason,
            ids,
        )
        if len(choice.request.output) == 1 and (self.kind == "chat" or ids):
            event = self._opening(choice) + event
        if finished and self.unfinished == 1:
            event += self._closing()
        self._write(event)
        super().on_token(choice, token, finished)

    def _opening(self, choice: Choice) -> bytes:
        """What precedes a choice's first token: the role of a chat, the prompt's ids if asked."""
        part: dict[str, Any] = {"index": choice.index}
        if self.kind == "chat":
            part["delta"] = {"role": "assistant", "content": ""}
        else:
            part["text"] = ""
        part |= {"logprobs": None, "finish_reason": None}
        extra = b""
        if self.return_token_ids and self.kind == "completion":
            part["prompt_token_ids"] = choice.request.prompt.tolist()
        elif self.return_token_ids:
            extra = b',"prompt_token_ids":' + _json(choice.request.prompt.tolist())
        return b'%b,"choices":[%b]%b}\n\n' % (self._prefix, _json(part), extra)

    def _closing(self) -> bytes:
        """What follows the last token of the last choice."""
        usage = b""
        if self._include_usage:
            usage = b'%b,"choices":[],"usage":%b}\n\n' % (self._prefix, _json(self.usage()))
        return usage + b"data: [DONE]\n\n"

    def _write(self, data: bytes) -> None:
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

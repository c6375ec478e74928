"""Builds answers from tokens: OpenAI's objects, or server-sent events.

A streamed token is one event, joined from prepared bytes and written straight to the transport:
with hundreds of streams, this is where a timed worker spends its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import msgspec

from engine.sampling.stops import StopText
from engine.scheduler.request import Request
from engine.server.errors import ApiError, error_body
from engine.server.settings import Logprobs
from engine.wire.tokens import StreamDecoder, Tokenizer

Entry = dict[str, Any]


def entry(tokenizer: Tokenizer, token: int, logprobs: Logprobs) -> Entry:
    """Return the log probabilities of one token in the form of chat answers. A part of a character
    becomes U+FFFD.
    """
    top = [_one(tokenizer, each, logprob) for each, logprob in logprobs.top]
    return _one(tokenizer, token, logprobs.logprob) | {"top_logprobs": top}


def shaped(entries: Sequence[Entry], kind: str, start: int = 0) -> dict[str, Any]:
    """Return the `logprobs` of a choice: `content` for a chat, four lists for a completion.

    Offsets count the characters of the tokens, from `start` on, which is the number of characters
    in tokens that were sent before.
    """
    if kind == "chat":
        return {"content": entries}
    offsets, at = [], start
    for one in entries:
        offsets.append(at)
        at += len(one["token"])
    return {
        "tokens": [one["token"] for one in entries],
        "token_logprobs": [one["logprob"] for one in entries],
        "top_logprobs": [
            # Parts of characters look the same; the likeliest of them is given.
            {each["token"]: each["logprob"] for each in reversed(one["top_logprobs"])}
            for one in entries
        ],
        "text_offset": offsets,
    }


def _one(tokenizer: Tokenizer, token: int, logprob: float) -> Entry:
    text = tokenizer.decode([token])
    # JSON has no infinity; vLLM shows the same number for an impossible token.
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


Kind = Literal["completion", "chat"]
_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Choice:
    """One choice of an answer: a sequence with its text. Lifetime: request."""

    request: Request
    index: int
    decoder: StreamDecoder
    submitted_s: float
    stops: StopText
    last_token_s: float = 0.0  # 0 before the first token
    is_stopped: bool = False  # a stop string ended it
    texts: list[str] = field(default_factory=list)  # of a whole answer, a piece a token
    logprob_chars: int = 0  # characters of the tokens whose logprobs were sent
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a whole answer, OpenAI's form

    def take(self, token: int, finished: str | None) -> str:
        """Return the text that is certain once `token` has come; a stop string that ends the answer
        is left out.
        """
        ends = finished == "stop" and token in self.request.stop_tokens
        text = "" if ends else self.decoder.step(token)
        piece = self.stops.push(text + self.decoder.end() if finished else text)
        if piece.stop is not None:
            self.is_stopped = True
            return piece.text
        return piece.text + self.stops.flush() if finished else piece.text


@dataclass(slots=True)
class Answer:
    """An answer to one HTTP request, with the state that all kinds of answers share. Lifetime: HTTP
    request; the last token sets `done`, once.
    """

    kind: Kind
    answer_id: str
    model: str
    created_s: int
    tokenizer: Tokenizer
    return_token_ids: bool
    each: int = 1  # choices a prompt
    shows_special: bool = False  # special tokens are part of the text
    kv_transfer_params: dict[str, Any] | None = None  # by which another worker reads its KV
    was_sent: bool = False  # it was sent, and the client did not hang up before
    is_early: bool = False  # sent before its end: another worker reads its KV and answers
    choices: list[Choice] = field(default_factory=list)
    unfinished: int = 0
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def is_stream(self) -> bool:
        """True if the answer is sent token by token."""
        return False

    def text_of(self, choice: Choice, token: int, finished: str | None) -> str:
        """Return the text to send with `token`; an answer that is sent as a whole has none before
        its end.
        """
        choice.texts.append(choice.take(token, finished))
        return ""

    def on_token(
        self,
        choice: Choice,
        token: int,
        text: str,
        finished: str | None,
        logprobs: Logprobs | None,
    ) -> None:
        """Add one token of a choice to the answer. `finished` is the reason if it is the choice's
        last token, else None.
        """
        if logprobs is not None:
            choice.logprobs.append(entry(self.tokenizer, token, logprobs))
        self._count(finished)

    def _count(self, finished: str | None) -> None:
        if finished is not None:
            self.unfinished -= 1
            if not self.unfinished and not self.done.done():
                self.done.set_result(None)

    def answer_early(self) -> None:
        """Send the answer before the first token, because the prompt's KV can be read already."""
        if not self.done.done():
            self.is_early = True
            self.done.set_result(None)

    def cut(self) -> None:
        """Stop waiting for tokens that will not come, because the worker shuts down."""
        if not self.done.done():
            self.done.set_exception(ApiError(503, "this worker is shutting down"))

    def fail(self, why: str, status: int = 500) -> None:
        """Stop waiting for tokens that could not be computed, or not in time; `why` and `status`
        are for the client.
        """
        if not self.done.done():
            self.done.set_exception(ApiError(status, why))

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's object `usage`, summed over all choices."""
        requests = [choice.request for choice in self.choices]
        # The choices of one prompt are adjacent; the prompt is counted once.
        prompt_tokens = sum(request.prompt_tokens for request in requests[:: self.each])
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
        """Return the fields at the beginning of every object and every chunk."""
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created_s,
            "model": self.model,
        }

    def body(self) -> bytes:
        """Return the whole answer as one JSON object, when it is done."""
        is_chat = self.kind == "chat"
        answer = self.head("chat.completion" if is_chat else "text_completion")
        answer["choices"] = [self._whole(choice) for choice in self.choices]
        answer["usage"] = self.usage()
        if is_chat and self.return_token_ids:
            answer["prompt_token_ids"] = self.choices[0].request.prompt.tolist()
        if self.kv_transfer_params is not None:
            answer["kv_transfer_params"] = self.kv_transfer_params
        return _json(answer)

    def text(self, choice: Choice) -> str:
        """Return the text of a choice of a whole answer, when it is done."""
        return "".join(choice.texts)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        request = choice.request
        text = self.text(choice)
        part: dict[str, Any] = {"index": choice.index}
        if self.kind == "chat":
            part["message"] = {"role": "assistant", "content": text}
        else:
            part["text"] = text
        logprobs = shaped(choice.logprobs, self.kind) if choice.logprobs else None
        reason = "length" if self.is_early else request.finish_reason
        part |= {"logprobs": logprobs, "finish_reason": reason}
        if self.return_token_ids:
            part["token_ids"] = request.output
            if self.kind == "completion":
                part["prompt_token_ids"] = request.prompt.tolist()
        return part


MAX_UNSENT_BYTES = 4 << 20  # a client that leaves more than this unread is cut off
LINGER_S = 5.0  # for a client to read the event that says why its stream ends


class StreamAnswer(Answer):
    """An answer sent as server-sent events. Lifetime: HTTP request.

    If `chunked` is True, each write is framed as a chunk of HTTP/1.1; the server writes the last,
    empty chunk. `on_slow` is called when the client has left too much unread; the connection is cut
    then.
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
        """Set the transport to which events are written; events are kept back until `open` is
        called.
        """
        self._early: list[bytes] | None = []
        self.begun = asyncio.Event()  # the first token is there
        self._transport = transport
        self._chunked = chunked
        self._include_usage = include_usage
        self._on_slow = on_slow
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        self._prefix = b"data: " + _json(self.head(name))[:-1]

    def open(self) -> None:
        """Write the events that were kept back, because the head of the response has been sent."""
        early, self._early = self._early, None
        if early:
            self._write(b"".join(early))

    @property
    def is_stream(self) -> bool:
        return True

    @property
    def may_fail(self) -> bool:
        """True if the stream may end with an error before its first token, at a deadline or because
        KV does not arrive.
        """
        requests = [choice.request for choice in self.choices]
        return any(isfinite(one.deadline_s) or one.imports for one in requests)

    async def first_or_done(self) -> None:
        """Wait until the stream has something to send. Raises ApiError if it will have nothing."""
        first = asyncio.ensure_future(self.begun.wait())
        try:
            await asyncio.wait((first, self.done), return_when=asyncio.FIRST_COMPLETED)
        finally:
            first.cancel()
        if not self.begun.is_set():
            await self.done

    def send_error(self, error: ApiError) -> None:
        """Send an event that says why the stream ends before its answer is complete."""
        self._write(self.error_event(error))

    def close_with(self, error: ApiError) -> None:
        """Send an event that says why the stream ends, and cut the connection, so that the stream
        does not look complete.
        """
        self.send_error(error)
        # Closed and not aborted: unsent bytes, with the event, are still sent.
        self._transport.close()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def error_event(self, error: ApiError) -> bytes:
        """Return the event for `error`, in vLLM's form."""
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
        likelihoods = b"null"
        if logprobs is not None:
            one = entry(self.tokenizer, token, logprobs)
            likelihoods = _json(shaped([one], self.kind, choice.logprob_chars))
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
            likelihoods,
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
        """Return the event before a chat's first token: the role, and the prompt's ids if
        requested.
        """
        delta = {"role": "assistant", "content": ""}
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = b""
        if self.return_token_ids:
            ids = b',"prompt_token_ids":' + _json(choice.request.prompt.tolist())
        return b'%b,"choices":[%b]%b}\n\n' % (self._prefix, _json(part), ids)

    def _closing(self) -> bytes:
        """Return the events after the last token of the last choice."""
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

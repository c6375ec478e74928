"""Answers in the making: tokens in, one OpenAI-shaped object out (streams: `streams.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from engine.request import Request
from engine.sampling.stops import StopText
from engine.server.errors import ApiError
from engine.server.logprobs import entry, shaped
from engine.server.runners import Logprobs
from engine.wire.tokens import Tokenizer

Kind = Literal["completion", "chat"]
_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Choice:
    """One sequence of an answer. Lifetime: request."""

    request: Request
    index: int
    decode: Callable[[int], str]
    submitted_s: float
    stops: StopText
    last_token_s: float = 0.0  # 0 before the first token
    is_stopped: bool = False  # a stop string ended it
    texts: list[str] = field(default_factory=list)  # of a whole answer that stop strings may cut
    logprob_chars: int = 0  # characters of the tokens whose logprobs were told
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a whole answer, OpenAI's form

    def take(self, token: int, finished: str | None) -> str:
        """The text that became certain with `token`; what ends an answer is no part of it."""
        ends = finished == "stop" and token in self.request.stop_tokens
        piece = self.stops.push("" if ends else self.decode(token))
        if piece.stop is not None:
            self.is_stopped = True
            return piece.text
        return piece.text + self.stops.flush() if finished else piece.text


@dataclass(slots=True)
class Answer:
    """What all answers share. Lifetime: HTTP request; `done` is set once, by the last token."""

    kind: Kind
    answer_id: str
    model: str
    created_s: int
    tokenizer: Tokenizer
    return_token_ids: bool
    each: int = 1  # choices a prompt
    shows_special: bool = False  # special tokens are part of the text
    choices: list[Choice] = field(default_factory=list)
    unfinished: int = 0
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def text_of(self, choice: Choice, token: int, finished: str | None) -> str:
        """The text to tell with `token`; a whole answer without stop strings is decoded at once."""
        sampling = choice.request.sampling
        if sampling is not None and sampling.stop:
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
        """Take in one token; `finished` says why it was the choice's last one."""
        if logprobs is not None:
            choice.logprobs.append(entry(self.tokenizer, token, logprobs))
        self._count(finished)

    def _count(self, finished: str | None) -> None:
        if finished is not None:
            self.unfinished -= 1
            if not self.unfinished and not self.done.done():
                self.done.set_result(None)

    def cut(self) -> None:
        """End the wait for tokens that will not come: the worker shuts down."""
        if not self.done.done():
            self.done.set_exception(ApiError(503, "this worker is shutting down"))

    def fail(self, why: str, status: int = 500) -> None:
        """End the wait for tokens that could not be computed, or not in time."""
        if not self.done.done():
            self.done.set_exception(ApiError(status, why))

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage over all choices."""
        requests = [choice.request for choice in self.choices]
        # The choices of one prompt stand together; it is counted once.
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

    def text(self, choice: Choice) -> str:
        """The text of a choice of a whole answer, when it is done."""
        if choice.texts:
            return "".join(choice.texts)
        request = choice.request
        ends = request.finish_reason == "stop" and request.output[-1] in request.stop_tokens
        said = request.output[:-1] if ends else request.output
        return self.tokenizer.decode(said, not self.shows_special)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        request = choice.request
        text = self.text(choice)
        part: dict[str, Any] = {"index": choice.index}
        if self.kind == "chat":
            part["message"] = {"role": "assistant", "content": text}
        else:
            part["text"] = text
        said = shaped(choice.logprobs, self.kind) if choice.logprobs else None
        part |= {"logprobs": said, "finish_reason": request.finish_reason}
        if self.return_token_ids:
            part["token_ids"] = request.output
            if self.kind == "completion":
                part["prompt_token_ids"] = request.prompt.tolist()
        return part

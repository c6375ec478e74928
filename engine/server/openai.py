"""The OpenAI endpoints: completions and chat completions, streamed and whole."""

from __future__ import annotations

import asyncio
import time
import uuid

import numpy as np
from aiohttp import web

from engine.scheduler_types import Refused
from engine.server import bodies
from engine.server.answers import Answer, Kind, StreamAnswer
from engine.server.bodies import ChatBody, CompletionBody
from engine.server.errors import ApiError, from_refusal
from engine.server.worker import Tokens, Worker

WORKER = web.AppKey("worker", Worker)
MAX_ID_CHARS = 128
# Longer texts are tokenized off the event loop, which has steps to end on time.
INLINE_TEXT_CHARS = 4096

_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/completions: `prompt` is a string, token ids, or an array of either.

    Several prompts give several choices, numbered in their order.
    """
    body = bodies.decode(await http.read(), bodies.COMPLETION)
    worker = admit(http, body)
    prompts = [
        await _tokens(worker, prompt, body.add_special_tokens)
        for prompt in bodies.prompts_of(body.prompt)
    ]
    return await _answer(http, worker, "completion", body, prompts)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    body = bodies.decode(await http.read(), bodies.CHAT)
    worker = admit(http, body)
    chat, now_s = body.chat, time.time()
    # Rendering is cheap next to encoding, but both grow with the messages.
    if (http.content_length or 0) > INLINE_TEXT_CHARS:
        ids = await asyncio.to_thread(worker.tokenizer.encode_chat, chat, now_s)
    else:
        ids = worker.tokenizer.encode_chat(chat, now_s)
    return await _answer(http, worker, "chat", body, [np.array(ids, dtype=np.int32)])


def admit(http: web.Request, body: CompletionBody | ChatBody) -> Worker:
    """The worker, if it takes requests, serves the model asked for and can give what is asked."""
    worker = http.app[WORKER]
    if worker.draining:
        raise ApiError(503, "this worker is shutting down")
    check_model(worker, body.model)
    if body.n not in (None, 1):
        raise ApiError(400, "n must be 1: send several prompts or several requests", "n")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    return worker


def check_model(worker: Worker, model: str | None) -> None:
    """A request may leave the model out, but not name another one."""
    if model is not None and model != worker.model:
        shown = model[:MAX_ID_CHARS]
        raise ApiError(
            404, f"The model `{shown}` does not exist; this is `{worker.model}`", "model"
        )


async def _tokens(worker: Worker, prompt: str | list[int], special: bool) -> Tokens:
    if isinstance(prompt, list):
        tokens = np.array(prompt, dtype=np.int32)
        if int(tokens.max()) >= worker.tokenizer.vocab:
            raise ApiError(
                400, f"token ids must be below {worker.tokenizer.vocab}, the vocabulary", "prompt"
            )
        return tokens
    encode = worker.tokenizer.encode
    if len(prompt) > INLINE_TEXT_CHARS:
        return np.array(await asyncio.to_thread(encode, prompt, special), dtype=np.int32)
    return np.array(encode(prompt, special), dtype=np.int32)


def _kept(prompt: Tokens, worker: Worker, body: CompletionBody | ChatBody) -> Tokens:
    """What `truncate_prompt_tokens` leaves of a prompt: the last ones, or the first.

    -1 stands for all that the context has room for.
    """
    limit = body.truncate_prompt_tokens
    if limit == -1:
        limit = worker.max_model_tokens - body.output_tokens
    if limit is None or limit >= len(prompt):
        return prompt
    if limit < 1:
        raise ApiError(400, "truncation leaves nothing of the prompt", "truncate_prompt_tokens")
    return prompt[:limit] if body.truncation_side == "right" else prompt[-limit:]


async def _answer(
    http: web.Request,
    worker: Worker,
    kind: Kind,
    body: CompletionBody | ChatBody,
    prompts: list[Tokens],
) -> web.StreamResponse:
    prompts = [_kept(prompt, worker, body) for prompt in prompts]
    longest = max(map(len, prompts))
    # Like vLLM, say so now instead of cutting the output later. Prompts that are too long by
    # themselves are the scheduler's to refuse.
    if longest < worker.max_model_tokens < longest + body.output_tokens:
        raise ApiError(
            400,
            f"{longest} prompt tokens and {body.output_tokens} to give exceed the "
            f"{worker.max_model_tokens} tokens of context",
            "max_tokens",
        )
    answer_type = StreamAnswer if body.stream else Answer
    answer = answer_type(
        kind=kind,
        answer_id=_answer_id(http, kind),
        model=worker.model,
        created_s=int(time.time()),
        tokenizer=worker.tokenizer,
        return_token_ids=bool(body.return_token_ids),
    )
    try:
        worker.start(answer, prompts, body.output_tokens, body.priority or 0, body.cache_salt)
    except Refused as refusal:
        raise from_refusal(refusal) from refusal
    try:
        if isinstance(answer, StreamAnswer):
            return await _stream(http, worker, answer, body.include_usage)
        await answer.done
        return web.Response(body=answer.body(), content_type="application/json")
    finally:
        # Also when the client has left: the server cancels the handler then.
        worker.abandon(answer)


async def _stream(
    http: web.Request, worker: Worker, answer: StreamAnswer, include_usage: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    chunked = http.version >= (1, 1)
    if chunked:
        response.enable_chunked_encoding()
    transport = http.transport
    if transport is None:
        raise ConnectionResetError("the client left before its answer began")
    # Attached first: preparing the response may wait, and steps go on meanwhile.
    answer.attach(transport, chunked, include_usage, worker.on_slow_client)
    await response.prepare(http)
    answer.open()
    try:
        await answer.done
    except ApiError:
        # Too late for a status: a stream that breaks off must not look complete.
        transport.abort()
    else:
        await response.write_eof()
    return response


def _answer_id(http: web.Request, kind: Kind) -> str:
    """`cmpl-` or `chatcmpl-` and the client's X-Request-Id, or a fresh one."""
    given = http.headers.get("X-Request-Id", "")[:MAX_ID_CHARS]
    prefix = "chatcmpl-" if kind == "chat" else "cmpl-"
    return prefix + (given or uuid.uuid4().hex)

"""The OpenAI endpoints: completions and chat completions, streamed or whole."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from aiohttp import web

from engine.scheduler.types import Refused
from engine.server import bodies
from engine.server.answers import Answer, Kind, StreamAnswer
from engine.server.bodies import (
    ChatBody,
    CompletionBody,
    refuse_unsupported,
    retention_of,
    sampling_of,
)
from engine.server.errors import ApiError, from_refusal
from engine.server.options import RequestOptions, tenant_of, timeout_s
from engine.server.worker import Tokens, Worker
from engine.wire.tokens import Chat, PromptError

WORKER = web.AppKey("worker", Worker)
MAX_ID_CHARS = 128
# Longer texts are tokenized off the event loop, which has steps to end on time.
INLINE_TEXT_CHARS = 4096

A = TypeVar("A", bound=Answer)

_SHUTTING_DOWN = 503
TOO_LATE = 504
_ESTABLISHED = 1  # of a TCP connection (Linux, `tcp_states.h`)
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/completions: complete a prompt, which is a string, token ids, or an array of either.

    Several prompts give several choices, numbered in order.
    """
    body = bodies.decode(await http.read(), bodies.COMPLETION)
    with _kv_of(http, body):
        worker = admit(http, body)
        prompts = [
            await tokens_of(worker, prompt, body.add_special_tokens)
            for prompt in bodies.prompts_of(body.prompt)
        ]
        return await _answer(http, worker, "completion", body, prompts)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions: answer a chat, streamed or as a whole."""
    body = bodies.decode(await http.read(), bodies.CHAT)
    with _kv_of(http, body):
        worker = admit(http, body)
        prompt = await encoded_chat(http, worker, bodies.chat_of(body))
        return await _answer(http, worker, "chat", body, [prompt])


@contextmanager
def _kv_of(http: web.Request, body: CompletionBody | ChatBody) -> Iterator[None]:
    """Tell the worker that has the request's KV that nobody will read it, if the request is refused
    within the block.
    """
    transfers = http.app[WORKER].transfers
    if transfers is not None:
        transfers.answer_read(http.protocol)
    try:
        yield
    except (ApiError, PromptError):
        http.app[WORKER].give_up(body.kv_transfer_params)
        raise


async def encoded_chat(http: web.Request, worker: Worker, chat: Chat) -> Tokens:
    """Return the token ids of a chat's prompt. Raises PromptError if the prompt cannot be
    tokenized.
    """
    now_s = time.time()
    # Rendering is cheap next to encoding, but both grow with the messages.
    if (http.content_length or 0) > INLINE_TEXT_CHARS:
        ids = await asyncio.to_thread(worker.tokenizer.encode_chat, chat, now_s)
    else:
        ids = worker.tokenizer.encode_chat(chat, now_s)
    return np.array(ids, dtype=np.int32)


def admit(http: web.Request, body: CompletionBody | ChatBody) -> Worker:
    """Return the worker if it takes requests, serves this model and can give this answer. Raises
    ApiError.
    """
    worker = http.app[WORKER]
    if worker.draining:
        raise ApiError(503, "this worker is shutting down")
    check_model(worker, body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    return worker


def check_model(worker: Worker, model: str | None) -> None:
    """Raise ApiError if a request names a model that this worker does not serve; a request may name
    none.
    """
    if model is not None and model != worker.model:
        shown = model[:MAX_ID_CHARS]
        raise ApiError(
            404, f"The model `{shown}` does not exist; this is `{worker.model}`", "model"
        )


async def tokens_of(worker: Worker, prompt: str | list[int], special: bool) -> Tokens:
    """Return the token ids of a prompt. Raises ApiError for ids that are not in the vocabulary."""
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


def truncated(prompt: Tokens, worker: Worker, body: CompletionBody | ChatBody) -> Tokens:
    """Return the prompt, cut to `truncate_prompt_tokens` tokens: its last tokens, or its first, as
    the request says. -1 means as many tokens as fit into the context.
    """
    limit = body.truncate_prompt_tokens
    if limit == -1:
        limit = worker.max_model_tokens - (body.output_tokens or 1)
    if limit is None or limit >= len(prompt):
        return prompt
    if limit < 1:
        raise ApiError(400, "truncation leaves nothing of the prompt", "truncate_prompt_tokens")
    return prompt[:limit] if body.truncation_side == "right" else prompt[-limit:]


def _output_tokens(worker: Worker, requested: int | None, longest: int) -> int:
    """Return the limit of output tokens for a prompt of `longest` tokens.

    Raises ApiError if the limit does not fit. As in vLLM, that is an error now, and the output is
    not cut later. The scheduler refuses prompts that are too long by themselves.
    """
    room = worker.max_model_tokens - longest
    if requested is None:
        return max(1, room if worker.served.computes else min(room, bodies.DEFAULT_CHAT_TOKENS))
    if 0 < room < requested:
        raise ApiError(
            400,
            f"{longest} prompt tokens and {requested} to give exceed the "
            f"{worker.max_model_tokens} tokens of context",
            "max_tokens",
        )
    return requested


def begin(
    http: web.Request,
    worker: Worker,
    make: type[A],
    kind: Kind,
    body: CompletionBody | ChatBody,
    prompts: list[Tokens],
) -> A:
    """Queue the sequences that `body` asks for, and return an answer of type `make`. The caller
    must call `abandon` with the answer in the end. Raises ApiError, and then nothing is queued.
    """
    if worker.served.computes:
        refuse_unsupported(body)
    prompts = [truncated(prompt, worker, body) for prompt in prompts]
    output_tokens = _output_tokens(worker, body.output_tokens, max(map(len, prompts)))
    sampling = sampling_of(body, output_tokens, worker.served.defaults, worker.tokenizer.vocab)
    if len(prompts) * sampling.n > bodies.MAX_PROMPTS:
        raise ApiError(400, f"prompts times n must be at most {bodies.MAX_PROMPTS}", "n")
    options = RequestOptions(
        output_tokens,
        body.priority or 0,
        body.cache_salt,
        timeout_s(http.headers),
        tenant_of(http.headers, worker.settings.tenant_header),
        retention_of(body.kv_cache_retention_config),
        body.kv_transfer_params,
    )
    answer = make(
        kind=kind,
        answer_id=_answer_id(http, kind),
        model=worker.model,
        created_s=int(time.time()),
        tokenizer=worker.tokenizer,
        return_token_ids=bool(body.return_token_ids),
        each=sampling.n,
        shows_special=body.skip_special_tokens is False,
    )
    try:
        worker.start(answer, prompts, sampling, options)
    except Refused as refusal:
        raise from_refusal(refusal) from refusal
    return answer


async def _answer(
    http: web.Request,
    worker: Worker,
    kind: Kind,
    body: CompletionBody | ChatBody,
    prompts: list[Tokens],
) -> web.StreamResponse:
    if body.stream:
        streamed = begin(http, worker, StreamAnswer, kind, body, prompts)
        return await stream(http, worker, streamed, body.include_usage)
    answer = begin(http, worker, Answer, kind, body, prompts)
    try:
        await answer.done
        answer.kv_transfer_params = worker.kv_of(answer)
        response = web.Response(body=answer.body(), content_type="application/json")
        if answer.kv_transfer_params is not None:
            await _send_with_kv_location(http, worker, answer, response)
        return response
    finally:
        # Also if the client has left: then the server cancels the handler. A request whose answer
        # was sent early continues for the worker that reads its KV.
        if not (answer.is_early and answer.was_sent):
            worker.abandon(answer)


async def _send_with_kv_location(
    http: web.Request, worker: Worker, answer: Answer, response: web.Response
) -> None:
    """Send an answer that says where its prompt's KV is, and record that it was sent, unless its
    client has hung up before.
    """
    await response.prepare(http)
    await response.write_eof()
    transport = http.transport
    if transport is None or worker.transfers is None:
        return
    if transport.is_closing() or _has_hung_up(transport):
        transport.abort()
        return
    answer.was_sent = True
    worker.transfers.answer_sent(http.protocol, answer.choices[0].request)


def _has_hung_up(transport: asyncio.Transport) -> bool:
    """Return True if the client has closed the connection. The kernel is asked, which knows it
    before the event loop does.
    """
    sock, info = transport.get_extra_info("socket"), getattr(socket, "TCP_INFO", None)
    if sock is None or info is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    state: int = sock.getsockopt(socket.IPPROTO_TCP, info, 1)[0]
    return state != _ESTABLISHED


async def stream(
    http: web.Request, worker: Worker, answer: StreamAnswer, include_usage: bool
) -> web.StreamResponse:
    """Send the events of `answer` as its tokens come. The answer is abandoned at its end, or when
    the client leaves.
    """
    try:
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        chunked = http.version >= (1, 1)
        if chunked:
            response.enable_chunked_encoding()
        transport = http.transport
        if transport is None:
            raise ConnectionResetError("the client left before its answer began")
        # Attached first: preparing the response may wait, and steps go on meanwhile.
        answer.attach(transport, chunked, include_usage, worker.on_slow_client)
        if answer.may_fail:
            # Then the status waits for the first token.
            await answer.first_or_done()
        await response.prepare(http)
        answer.open()
        try:
            await answer.done
        except ApiError as error:
            # Too late for a status: a stream that breaks off must not look complete.
            if error.status == _SHUTTING_DOWN:
                transport.abort()
            elif error.status == TOO_LATE:
                # The worker made no mistake, so the connection ends properly.
                answer.send_error(error)
                await response.write_eof()
            else:
                answer.close_with(error)
        else:
            await response.write_eof()
        return response
    finally:
        worker.abandon(answer)


def _answer_id(http: web.Request, kind: Kind) -> str:
    """Return `cmpl-` or `chatcmpl-` with the client's X-Request-Id, or with a new id."""
    given = http.headers.get("X-Request-Id", "")[:MAX_ID_CHARS]
    prefix = "chatcmpl-" if kind == "chat" else "cmpl-"
    return prefix + (given or uuid.uuid4().hex)

"""A worker with the APIs that our own engine lacks: a real server with fixed answers in their
shapes.

Its fields follow OpenAI's API reference (responses, embeddings), Anthropic's (messages, version
2023-06-01), vLLM 0.33 (scores, ranks) and SGLang 0.5.23 (`/generate`). The engine computes nothing:
its answers are fixed, so that tests can compare what a client got with what the engine sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.served_app import served_by

WORDS = ("Good", " day", ", you", " two", ".")
PROMPT_TOKENS, CACHED_TOKENS = 31, 16


def _sse(name: str, **fields: Any) -> bytes:
    data = json.dumps({"type": name, **fields})
    return f"event: {name}\ndata: {data}\n\n".encode()


def responses_usage() -> dict[str, Any]:
    return {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": CACHED_TOKENS},
        "output_tokens": len(WORDS),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT_TOKENS + len(WORDS),
    }


def response(model: str, status: str) -> dict[str, Any]:
    """Return a response object; it has a text and usage only if `status` is "completed"."""
    text = "".join(WORDS) if status == "completed" else ""
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": status}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_700_000_000,
        "status": status,
        "model": model,
        "output": [{**message, "content": [part]}] if text else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": responses_usage() if text else None,
    }


def responses_events(model: str) -> list[bytes]:
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress"}
    begun, whole = response(model, "in_progress"), response(model, "completed")
    events = [
        ("response.created", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": {**item, "content": []}}),
        ("response.content_part.added", {**at, "part": part}),
        *(("response.output_text.delta", {**at, "delta": w, "logprobs": []}) for w in WORDS),
        ("response.output_text.done", {**at, "text": "".join(WORDS), "logprobs": []}),
        ("response.completed", {"response": whole}),
    ]
    return [_sse(name, sequence_number=n, **body) for n, (name, body) in enumerate(events)]


def message(model: str) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": "".join(WORDS)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": message_usage(output_tokens=len(WORDS)),
    }


def message_usage(output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": PROMPT_TOKENS - CACHED_TOKENS,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": CACHED_TOKENS,
        "output_tokens": output_tokens,
    }


def message_events(model: str) -> list[bytes]:
    begun = {**message(model), "content": [], "stop_reason": None, "usage": message_usage(1)}
    deltas = [{"type": "text_delta", "text": word} for word in WORDS]
    return [
        _sse("message_start", message=begun),
        _sse("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        _sse("ping"),
        *(_sse("content_block_delta", index=0, delta=delta) for delta in deltas),
        _sse("content_block_stop", index=0),
        _sse(
            "message_delta",
            delta={"stop_reason": "end_turn", "stop_sequence": None},
            usage={"output_tokens": len(WORDS)},
        ),
        _sse("message_stop"),
    ]


def generated(words: Iterable[str]) -> dict[str, Any]:
    said = list(words)
    return {
        "text": "".join(said),
        "output_ids": list(range(len(said))),
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop"} if len(said) == len(WORDS) else None,
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": len(said),
            "cached_tokens": CACHED_TOKENS,
        },
    }


def generate_events(model: str) -> list[bytes]:
    texts = (generated(WORDS[: n + 1]) for n in range(len(WORDS)))
    return [b"data: %s\n\n" % json.dumps(t).encode() for t in texts] + [b"data: [DONE]\n\n"]


def embedded(body: Any) -> dict[str, Any]:
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    row = {"object": "embedding", "embedding": [0.25, -0.5]}
    return {
        "id": "embd-1",
        "object": "list",
        "created": 1_700_000_000,
        "model": body.get("model"),
        "data": [{**row, "index": n} for n, _ in enumerate(texts)],
        "usage": {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS},
    }


def ranked(body: Any) -> dict[str, Any]:
    rows = [{"index": n, "relevance_score": 0.5} for n, _ in enumerate(body["documents"])]
    return {"id": "rank-1", "model": "m", "usage": {"total_tokens": 9}, "results": rows}


def chat(body: Any) -> dict[str, Any]:
    """Return a chat completion with `n` choices, each of which calls the request's first tool."""
    name = body["tools"][0]["function"]["name"]
    call = {"id": "call_1", "type": "function"}
    tool_calls = [{**call, "function": {"name": name, "arguments": '{"what": "it"}'}}]
    said = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    chance = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    row = {"message": said, "finish_reason": "tool_calls", "logprobs": {"content": [chance]}}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": body["model"],
        "choices": [{"index": n, **row} for n in range(body.get("n", 1))],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    }


STREAMS = {
    "/v1/responses": responses_events,
    "/v1/messages": message_events,
    "/generate": generate_events,
}


@dataclass
class ApiEngine:
    """An engine of one model that serves the paths in `serves`. It answers other paths with 404, as
    Starlette does.

    Lifetime: test.
    """

    model: str
    serves: frozenset[str]
    url: str = ""
    asked: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)
    # Streams wait for this after their first event; no token has been computed before.
    computed: asyncio.Event = field(default_factory=asyncio.Event)

    def paths(self) -> list[str]:
        """Return the paths of all requests that the engine got."""
        return [path for path, _, _ in self.asked]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if request.method == "GET" and path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": self.model}]})
        if request.method == "GET" and path in ("/health", "/v2/health/live"):
            return web.Response()
        raw = await request.read()
        if request.method == "GET" and path not in self.serves:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.asked.append((path, raw, dict(request.headers)))
        if path not in self.serves:
            return web.json_response({"detail": "Not Found"}, status=404)
        if path.startswith("/v2/"):  # Triton's own: a tensor as JSON
            row = {"name": "output_ids", "shape": [1, 3], "datatype": "INT32", "data": [4, 5, 6]}
            return web.json_response({"model_name": "m", "model_version": "1", "outputs": [row]})
        if path == "/opaque":
            return web.Response(body=raw[::-1], headers={"x-seen": path})
        body = json.loads(raw)
        if body.get("model", self.model) != self.model:
            why = f"The model `{body['model']}` does not exist."
            error = {"message": why, "type": "NotFoundError", "param": "model", "code": 404}
            return web.json_response({"error": error}, status=404)
        if body.get("stream"):
            return await self._stream(request, STREAMS[path](self.model))
        return web.json_response(self._complete_answer(path, body))

    async def _stream(self, request: web.Request, events: list[bytes]) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        await reply.write(events[0])
        await self.computed.wait()
        for event in events[1:]:
            await reply.write(event)
        await reply.write_eof()
        return reply

    def _complete_answer(self, path: str, body: Any) -> Any:
        if path == "/v1/responses":
            return response(self.model, "completed")
        if path == "/v1/messages":
            return message(self.model)
        if path == "/v1/messages/count_tokens":
            return {"input_tokens": PROMPT_TOKENS}
        if path == "/v1/chat/completions":
            return chat(body)
        if path == "/v1/embeddings":
            return embedded(body)
        if path == "/generate":
            return generated(WORDS)
        return ranked(body)


@asynccontextmanager
async def api_engine(model: str, *serves: str) -> AsyncIterator[ApiEngine]:
    """Yield a running engine of `model` that serves the paths in `serves`."""
    engine = ApiEngine(model, frozenset(serves))
    engine.computed.set()
    async with served_by(engine.answer, client_max_size=1 << 24) as engine.url:
        try:
            yield engine
        finally:
            engine.computed.set()

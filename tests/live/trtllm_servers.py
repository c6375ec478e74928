"""Context and generation servers of TensorRT-LLM as mocks, since the engine itself needs a GPU.

Each is a real HTTP server that follows the protocol in the orchestrator's source (2026-08,
`serve/openai_disagg_service.py`, `disagg_auth.py`, `disagg_auto_scaling.py`). KV is kept under an
opaque state until a generation server fetches it, once. A server refuses requests that name unknown
or used KV or another request's number, or that are signed wrongly. The next token is a function of
the tokens before it, so that an answer by two servers can be compared with that by one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from tests.live.stack import MODEL
from tests.served_app import served_app

END = 7  # the token that ends an answer


def next_token(tokens: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(tokens).encode()).digest()[:2], "big") % 499 + 8


def answer_of(prompt: str, count: int) -> str:
    """Return the answer to a prompt that one server alone gives."""
    tokens = list(prompt.encode())
    said = []
    for _ in range(count):
        said.append(next_token(tokens))
        tokens.append(said[-1])
    return text_of(said)


def text_of(tokens: list[int]) -> str:
    return "".join(f" t{token}" for token in tokens)


@dataclass
class Fabric:
    """The KV that context servers keep, by opaque state, in place of the transport between servers.

    Lifetime: test.
    """

    kept: dict[str, tuple[Server, dict[str, Any], list[int]]] = field(default_factory=dict)
    fetched: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass
class Server:
    """One context or generation server of TensorRT-LLM. Lifetime: test."""

    fabric: Fabric
    key: str | None = None
    ends_at_once: bool = False  # the first token of any answer ends it
    compute_s: float = 0.0  # of each request
    faults: deque[str] = field(default_factory=deque)  # of the next requests; "": none
    asked: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    url: str = ""
    http_loop: asyncio.Event = field(default_factory=asyncio.Event)  # set: the fault "hang" ends

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        card = {"id": MODEL, "object": "model", "owned_by": "tensorrt_llm"}
        endpoint = {"ctx_info_endpoint": ["tcp://10.0.0.1:5000"]}
        pages: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [card]},
            "/health": {},
            "/server_info": {"disaggregated_params": endpoint, "tokens_per_block": 32},
        }
        for path, page in pages.items():
            app.router.add_get(path, partial(_page, page))
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.heads.append({name.lower(): value for name, value in request.headers.items()})
        fault = self.faults.popleft() if self.faults else ""
        self.running += 1
        try:
            if fault == "hang":
                await self.http_loop.wait()
            if fault in ("close", "hang"):
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            if fault:
                return _error(int(fault), "told to fail")
            await asyncio.sleep(self.compute_s)
            params = body.get("disaggregated_params")
            if params is None:
                return await self._generate(request, body, _ids(body), [])
            if params["request_type"] == "context_only":
                return self._context(body, params)
            return await self._take_over(request, body, params)
        finally:
            self.running -= 1

    def _context(self, body: dict[str, Any], params: dict[str, Any]) -> web.Response:
        if body.get("stream") or body.get("n", 1) != 1:
            return self._refuse(400, "a context request streams nothing and has one choice")
        tokens = _ids(body)
        first = END if self.ends_at_once else next_token(tokens)
        choice = _choice(body, text_of([first]), "stop" if first == END else "length")
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        answer = {"model": MODEL, "choices": [choice], "prompt_token_ids": tokens, "usage": usage}
        if first != END:
            number = params["disagg_request_id"]
            state = base64.b64encode(secrets.token_bytes(12)).decode()
            told = {
                "request_type": "context_only",
                "first_gen_tokens": [first],
                "ctx_request_id": number,
                "disagg_request_id": number,
                "encoded_opaque_state": state,
                "draft_tokens": None,
            }
            self.fabric.kept[state] = self, told, tokens
            choice["disaggregated_params"] = told
        return _json(answer)

    async def _take_over(
        self, request: web.Request, body: dict[str, Any], params: dict[str, Any]
    ) -> web.StreamResponse:
        if self.key is not None:
            names = ("ctx_info_endpoint", "encoded_opaque_state")
            signed = json.dumps({name: params.get(name) for name in names}, separators=(",", ":"))
            right = hmac.new(self.key.encode(), signed.encode(), "sha256").hexdigest()
            given = request.headers.get("x-trtllm-disagg-auth", "")
            if not hmac.compare_digest(given, f"sha256={right}"):
                return self._refuse(401, "wrong signature")
        server, told, tokens = self.fabric.kept.pop(
            params["encoded_opaque_state"], (None, {}, list[int]())
        )
        if server is None:
            return self._refuse(400, "KV that nobody keeps, or that was fetched")
        if server is self:
            return self._refuse(400, "a server takes no KV from itself")
        if any(params.get(name) != told[name] for name in told if name != "request_type"):
            return self._refuse(400, "other parameters than the context server gave")
        if _ids(body) != tokens:
            return self._refuse(400, "other tokens than the context server had")
        if not isinstance(params.get("ctx_usage"), dict):
            return self._refuse(400, "no ctx_usage")
        self.fabric.fetched += 1
        return await self._generate(request, body, tokens, told["first_gen_tokens"])

    def _refuse(self, status: int, why: str) -> web.Response:
        self.fabric.refused.append(why)
        return _error(status, why)

    async def _generate(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], first: list[int]
    ) -> web.StreamResponse:
        said = list(first)
        while len(said) < body.get("max_tokens", 16):
            said.append(next_token(prompt + said))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said)}
        if not body.get("stream"):
            choice = _choice(body, text_of(said), "length")
            return _json({"model": MODEL, "choices": [choice], "usage": usage})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for token in said:
            choice = {"index": 0, "text": text_of([token]), "finish_reason": None}
            await reply.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
        return reply


def _ids(body: dict[str, Any]) -> list[int]:
    ids = body.get("prompt_token_ids", body.get("prompt"))
    if ids is None:
        return list("".join(str(m["content"]) for m in body["messages"]).encode())
    return list(ids.encode()) if isinstance(ids, str) else list(ids)


def _choice(body: dict[str, Any], text: str, reason: str) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": text}} if "messages" in body else {}
    return {"index": 0, **(said or {"text": text}), "finish_reason": reason}


async def _page(page: Any, request: web.Request) -> web.Response:
    return _json(page)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)


def _error(status: int, why: str) -> web.Response:
    return _json({"object": "error", "message": why, "error": {"message": why}}, status)


@asynccontextmanager
async def serving(fabric: Fabric, **options: Any) -> AsyncIterator[Server]:
    """Yield one running context or generation server."""
    server = Server(fabric, **options)
    async with served_app(server.app(), shutdown_timeout=0.1) as server.url:
        yield server
        server.http_loop.set()


@asynccontextmanager
async def announced(server: Server, store: str, role: int, ttl_s: int = 2) -> AsyncIterator[None]:
    """Register the server in the store during the block and renew its key, as `DisaggClusterWorker`
    does.
    """
    host, _, port = server.url.removeprefix("http://").partition(":")
    name = f"{'CONTEXT' if role == 0 else 'GENERATION'}-{host}:{port}-1-2-003"
    key = f"/trtllm-disagg/blue/workers/{name}"
    info = {"worker_id": name, "host": host, "port": int(port), "role": role}
    item = {"key": key, "value": json.dumps(info), "expire_time": -1, "ttl": ttl_s}

    async def renew(http: aiohttp.ClientSession) -> None:
        while True:
            with suppress(aiohttp.ClientConnectorError):  # tried again, as the real servers do
                async with http.get(f"{store}/expire", params={"key": key, "ttl": ttl_s}) as reply:
                    renewed = reply.status == 200 and (await reply.json())["result"]
                if not renewed:
                    body = item | {"overwrite_if_exists": False}
                    async with http.post(f"{store}/set", json=body) as reply:
                        assert (reply.status, await reply.json()) == (200, {"result": True})
            await asyncio.sleep(ttl_s / 4)

    async with aiohttp.ClientSession() as http:
        renewing = asyncio.create_task(renew(http))
        try:
            yield
        finally:
            renewing.cancel()
            result = (await asyncio.gather(renewing, return_exceptions=True))[0]
            assert isinstance(result, asyncio.CancelledError), result

"""A server with a protocol of its own, "seventh", in front of one of our real simulated workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.live.ports import lasting_port
from tests.live.stack import metric_sum

BLOCK_TOKENS, KV_TOKENS = 16, 64_000
OURS, THEIRS = "kv_transfer_params", "seventh_kv"
_KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}


class SeventhServer:
    """The HTTP server of the engine "seventh", which exists only in tests. Lifetime: test."""

    def __init__(self, worker_url: str, role: str, http: aiohttp.ClientSession) -> None:
        self._worker_url = worker_url
        self._role = role
        self._http = http
        self.asked: list[dict[str, Any]] = []  # bodies of inference requests

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/seventh", self._info)
        app.router.add_get("/seventh/load", self._load)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        async with self._http.get(f"{self._worker_url}/v1/models") as reply:
            models = await reply.json()
        for card in models["data"]:
            card["owned_by"] = "seventh"
        return web.json_response(models)

    async def _info(self, request: web.Request) -> web.Response:
        info = {"engine": "seventh", "version": "7.1", "role": self._role}
        return web.json_response(info | {"block_tokens": BLOCK_TOKENS, "kv_tokens": KV_TOKENS})

    async def _load(self, request: web.Request) -> web.Response:
        load = {
            name: int(await metric_sum(self._http, self._worker_url, gauge))
            for name, gauge in _GAUGES.items()
        }
        share = await metric_sum(self._http, self._worker_url, "vllm:kv_cache_usage_perc")
        return web.json_response(load | {"kv_used_tokens": int(share * KV_TOKENS)})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(dict(body))
        kv = body.pop(THEIRS, None)
        if kv is not None:
            body[OURS] = _KEEP if kv == {"keep": True} else kv
        async with self._http.post(f"{self._worker_url}/v1/completions", json=body) as reply:
            if reply.content_type == "application/json":
                answer = await reply.json()
                if OURS in answer:
                    answer[THEIRS] = answer.pop(OURS)
                return web.json_response(answer, status=reply.status)
            stream = web.StreamResponse(headers={"Content-Type": reply.headers["Content-Type"]})
            await stream.prepare(request)
            async for data in reply.content.iter_any():
                await stream.write(data)
            return stream


@asynccontextmanager
async def serving(worker_url: str, role: str) -> AsyncIterator[tuple[str, SeventhServer]]:
    """Run the server of the engine "seventh" in front of a worker; yield its URL and the server."""
    async with aiohttp.ClientSession() as http:
        server = SeventhServer(worker_url, role, http)
        runner = web.AppRunner(server.app())
        await runner.setup()
        port = lasting_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}", server
        finally:
            await runner.cleanup()


def kv_field_of(body: dict[str, Any]) -> str:
    """Return, as JSON, the body's field that says where the KV is, or null if it has none."""
    return json.dumps(body.get(THEIRS))

"""An engine whose process is replaced by another version behind the same URL in less than 0.1 s.

Connections to the old process end, and a health probe hardly ever falls into the gap. For every
disaggregated request the engine records which version made the KV and which one read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from tests.live.stack import MODEL

PREFILL_S, DECODE_S = 0.015, 0.03
START_S = 0.1  # from the end of one process to the first connection of the next
_PARAMS = "kv_transfer_params"
_VERSION = web.AppKey("version", str)


class SwappedEngine:
    """A worker with vLLM's API whose requests go to prefill first and then to decode. Lifetime:
    test.
    """

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        """Create the engine; for each answer that read KV, `pairs` gets the versions of the prefill
        and the decode.
        """
        self.version = ""
        self.url = ""
        self.asked = 0  # for its version
        self._pairs = pairs
        self._port = 0
        self._runner: web.AppRunner | None = None

    @asynccontextmanager
    async def serving(self, version: str) -> AsyncIterator[SwappedEngine]:
        await self.swap(version)
        try:
            yield self
        finally:
            assert self._runner is not None
            await self._runner.cleanup()

    async def swap(self, version: str) -> None:
        """Replace the engine's process by one of this version."""
        before = self._runner
        if before is not None:
            for site in list(before.sites):
                await site.stop()
            assert before.server is not None
            for connection in list(before.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(START_S)
        app = web.Application(middlewares=(self._living,))
        app[_VERSION] = self.version = version
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._well)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"
        if before is not None:
            await before.cleanup()

    @web.middleware
    async def _living(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests on connections that belong to an old process."""
        if request.app[_VERSION] != self.version and request.transport is not None:
            request.transport.abort()
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _well(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _version(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"version": request.app[_VERSION]})

    async def _serve(self, request: web.Request) -> web.Response:
        own = request.app[_VERSION]
        if own != self.version:
            raise web.HTTPGone
        body: dict[str, Any] = await request.json()
        params = body.get(_PARAMS) or {}
        usage = {"prompt_tokens": 9, "completion_tokens": 1}
        if params.get("do_remote_decode"):
            await asyncio.sleep(PREFILL_S)
            kv = {"remote_engine_id": own, "remote_request_id": "r", "remote_port": 1}
            kv |= {"remote_host": "127.0.0.1", "remote_block_ids": [[1]], "tp_size": 1}
            choice = {"text": " x", "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage, _PARAMS: kv})
        if "remote_engine_id" in params:
            self._pairs.append((params["remote_engine_id"], own))
        await asyncio.sleep(DECODE_S)
        choice = {"text": " a b", "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage})

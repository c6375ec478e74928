"""A server with a real tokenizer and vLLM's renderer protocol that can be made to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from engine.wire.hf import HfTokenizer
from engine.wire.tokens import Chat
from tests.live.ports import lasting_port

_HUGE = b'{"token_ids":[' + b"1," * (25 << 20) + b"1]}"  # 50 MB


class FaultyRenderer:
    """The render server, which works correctly while `fault` is "none". Lifetime: test."""

    def __init__(self, model: str, folder: Path) -> None:
        self.fault = "none"
        self.port = lasting_port()
        self._model = model
        self._tokenizer = HfTokenizer(folder, "auto", {})
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def turn(self, fault: str) -> None:
        """Make the server fail with this fault from now on."""
        self.fault = fault
        if fault == "killed":
            await self.stop()
        elif self._runner is None:
            await self.start()

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions/render", self._render),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self._model, "owned_by": "warmroute"}]}
        )

    async def _render(self, http: web.Request) -> web.Response:
        body = await http.read()
        fields: dict[str, Any] = msgspec.json.decode(body)
        probed = fields["messages"] == [{"role": "user", "content": "a"}]
        shown = fields if b"image_url" not in body else {"messages": [{"role": "user"}]}
        ids = self._tokenizer.encode_chat(msgspec.convert(shown, Chat), 0.0)
        match self.fault:
            case "hanging":
                await asyncio.sleep(3_600)
            case "slow" if not probed:
                await asyncio.sleep(1)
            case "breaks on images" if b"image_url" in body:
                return web.Response(status=500, text="no such image")
            case "breaks":
                return web.Response(status=500, text="broken")
            case "forbidden":
                return web.json_response({"error": {"message": "no"}}, status=403)
            case "garbage":
                return web.json_response({"token_ids": "none of your business"})
            case "negative":
                ids = [-1, *ids[1:]]
            case "huge":
                return web.Response(body=_HUGE)
            case "longer":
                ids = [*ids, 1, 1, 1]
            case "another":  # a tokenizer with one token for each byte
                ids = list(body)
        return web.json_response({"token_ids": ids, "features": None})


@asynccontextmanager
async def faulty_renderer(model: str, folder: Path) -> AsyncIterator[FaultyRenderer]:
    """Yield a running render server of `model` with the tokenizer in `folder`."""
    renderer = FaultyRenderer(model, folder)
    await renderer.start()
    try:
        yield renderer
    finally:
        await renderer.stop()

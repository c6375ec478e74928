"""An engine that answers at once, light enough to run dozens in one test."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web

from tests.live.ports import lasting_port
from tests.live.stack import MODEL


@dataclass
class LightEngine:
    """An engine that can be started and stopped many times at the same URL. Lifetime: test."""

    model: str = MODEL
    adapters: tuple[str, ...] = ()
    port: int = field(default_factory=lasting_port)
    host: str = "127.0.0.1"
    closed: bool = False  # the routers no longer use it: any request now is wrong
    asked: Counter[str] = field(default_factory=Counter)  # by model
    wrong: int = 0
    root: str | None = None  # the name of its model's root; None: it states none
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def running(self) -> bool:
        return self._runner is not None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """Stop the engine as in a crash: cut running requests and close the port."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": self.model, "max_model_len": 100_000, "root": self.root}]
        cards += [{"id": name, "parent": self.model} for name in self.adapters]
        return web.json_response({"object": "list", "data": cards})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked[body["model"]] += 1
        self.wrong += self.closed
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        choice = {"index": 0, "text": self.url, "finish_reason": "length"}
        return web.json_response({"id": "x", "choices": [choice], "usage": usage})

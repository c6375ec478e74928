"""An engine that gives the answer that a request's header names: any content type, any body."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web

from tests.live.ports import lasting_port
from tests.live.stack import MODEL

ANSWER_HEADER = "x-told"  # the name of an answer
EVENTS, JSON, PAGE = "text/event-stream", "application/json", "text/html"


@dataclass
class NamedAnswerEngine:
    """An engine that gives the answer that a request's header names. Lifetime: test."""

    answers: dict[str, tuple[str, bytes]]  # name -> content type, body
    always: str = ""  # the answer that it gives to every request
    port: int = field(default_factory=lasting_port)
    asked: Counter[str] = field(default_factory=Counter)  # by the name told
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": MODEL, "max_model_len": 100_000}]
        return web.json_response({"object": "list", "data": cards})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        told = request.headers[ANSWER_HEADER]
        self.asked[told] += 1
        kind, body = self.answers[self.always or told]
        if kind != EVENTS:
            return web.Response(body=body, headers={"Content-Type": kind})
        reply = web.StreamResponse(headers={"Content-Type": kind})
        await reply.prepare(request)
        # As engines write it: one event at a time.
        for event in body.split(b"\n\n"):
            if event:
                await reply.write(event + b"\n\n")
        await reply.write_eof()
        return reply

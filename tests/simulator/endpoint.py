"""A small server with OpenAI's API on a real socket, for tests of the load generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.served_app import served_app

DEADLINE_S = 60.0  # full machines take 20 s to start a program
POLL_S = 0.005
Behaviour = Callable[[int], str]


class Endpoint:
    """A server that answers the n-th completion request in the way that `behaviour(n)` names. ok:
    the whole stream; busy: 429; down: 503; bad: 400; cut: closes in the middle of the stream;
    short: ends cleanly without the end mark; silent: never answers; error: an error event.
    Lifetime: test.
    """

    def __init__(
        self, behaviour: Behaviour = lambda _: "ok", gap_s: float = 0.0, named: bool = True
    ) -> None:
        self.behaviour = behaviour
        self.named = named  # replies name their worker
        self.gap_s = gap_s
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str | None] = []
        self.running = 0
        self.running_max = 0
        self.gone = 0
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        kind = self.behaviour(number)
        if kind in ("busy", "down", "bad"):
            status = {"busy": 429, "down": 503, "bad": 400}[kind]
            return web.json_response({"error": {"message": kind}}, status=status)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            return await self._stream(request, kind, body)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, kind: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        if kind == "silent":
            await asyncio.Event().wait()
        name = {"x-warmroute-worker": f"w{len(self.bodies) % 2}"} if self.named else {}
        reply = web.StreamResponse(headers=name)
        await reply.prepare(request)
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.gap_s)
            await reply.write(b'data: {"choices":[{"text":" t%d"}]}\n\n' % index)
            if kind == "cut":
                assert request.transport is not None
                request.transport.abort()
                return reply
        if kind == "error":
            await reply.write(b'data: {"error":{"message":"broken"}}\n\n')
        if kind != "short":
            await reply.write(
                b'data: {"choices":[],"usage":{"completion_tokens":%d,'
                b'"prompt_tokens_details":{"cached_tokens":7}}}\n\ndata: [DONE]\n\n'
                % body["max_tokens"]
            )
        await reply.write_eof()
        return reply


@asynccontextmanager
async def serve(endpoint: Endpoint) -> AsyncIterator[Endpoint]:
    """Run `endpoint` on a port that the system picks."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", endpoint.completions)
    app.router.add_get("/v1/models", endpoint.models)
    async with served_app(app, handler_cancellation=True) as endpoint.url:
        yield endpoint


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; raise TimeoutError if it does not hold in time."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(POLL_S)

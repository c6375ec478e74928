"""A worker for tests that returns the bytes of each request, whole or as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.served_app import served_by

MODEL = "echo"
EVENTS = 20


@dataclass
class EchoWorker:
    """A worker that does what a request's header `x-do` says: echo, events, hang, or fail.

    Lifetime: test.
    """

    url: str = ""
    heads: list[dict[str, str]] = field(default_factory=list)
    left: int = 0  # requests whose clients left before the end

    @property
    def address(self) -> str:
        """The worker's address as HOST:PORT."""
        return self.url.removeprefix("http://")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request as its header `x-do` says."""
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": MODEL}]})
        if request.method == "GET":
            return web.json_response({}) if request.path == "/health" else web.Response(status=404)
        body = await request.read()
        self.heads.append({name.lower(): value for name, value in request.headers.items()})
        what = request.headers.get("x-do", "echo")
        try:
            if what == "events":
                return await self._events(request)
            if what == "hang":
                await asyncio.sleep(3_600)
            if what == "fail":
                return web.json_response({"error": {"message": "as asked"}}, status=500)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        return web.Response(body=body, content_type="application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        pause_s = float(request.headers.get("x-pause-s", "0.01"))
        for number in range(EVENTS):
            await reply.write(event(number))
            await asyncio.sleep(pause_s)
        await reply.write(b"data: [DONE]\n\n")
        return reply


def event(number: int) -> bytes:
    """Return one event of a streamed answer; the last event has the usage."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "text": f"word {number}"}]}
    if number == EVENTS - 1:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": EVENTS}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@asynccontextmanager
async def echo_worker() -> AsyncIterator[EchoWorker]:
    """Yield a running echo worker."""
    worker = EchoWorker()
    async with served_by(worker.handle, client_max_size=1 << 26) as url:
        worker.url = url
        yield worker

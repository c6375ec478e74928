"""A proxy in front of a real server's HTTP port that changes the answers of the paths that a test
names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

Change = Callable[[str], str]
Ask = Callable[[bytes], bytes]
_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


@dataclass
class LyingFront:
    """A proxy between the router and a server. `changes` has a function for each path whose answers
    it changes, and may change at any time; `asks` changes the bodies of requests.

    Lifetime: test.
    """

    upstream: str
    http: aiohttp.ClientSession
    changes: dict[str, Change] = field(default_factory=dict)
    asks: Ask = bytes
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        """Return the server's answer with the path's change applied."""
        body = self.asks(await request.read())
        kept = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        url = f"{self.upstream}{request.rel_url}"
        async with self.http.request(request.method, url, data=body, headers=kept) as reply:
            text = await reply.text()
            if request.path in self.changes:
                text = self.changes[request.path](text)
            headers = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
            return web.Response(status=reply.status, headers=headers, body=text.encode())


@asynccontextmanager
async def fronted(upstream: str) -> AsyncIterator[LyingFront]:
    """Yield a proxy that changes nothing yet; it passes on each answer as a whole, even a
    stream.
    """
    async with aiohttp.ClientSession() as http:
        front = LyingFront(upstream, http)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", front.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        front.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield front
        finally:
            await runner.cleanup()

"""A proxy in front of an engine's HTTP port that damages only the engine's KV snapshots.

A snapshot is refused, cut off, or delayed before or after the engine takes it, so that it is newer
or older than the live events that the router has by then.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

HARMS = ("refused", "cut", "late_and_new", "late_and_old", "never")
LATE_S = 0.5  # at most
NEVER_S = 30.0  # longer than the router waits
_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


@dataclass
class HttpFront:
    """The proxy that damages snapshots. Lifetime: test; the engine's process may be replaced at the
    same port.
    """

    rng: random.Random
    upstream: str
    http: aiohttp.ClientSession
    harm: float = 0.0  # the probability that a snapshot is harmed
    counted: Counter[str] = field(default_factory=Counter)
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_get("/kv_snapshot", self._snapshot)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        harm = self.rng.choice(HARMS) if self.rng.random() < self.harm else "none"
        self.counted[f"snapshot_{harm}"] += 1
        if harm == "refused":
            raise web.HTTPServiceUnavailable
        if harm == "never":
            await asyncio.sleep(NEVER_S)
        if harm == "late_and_new":
            await asyncio.sleep(self.rng.uniform(0, LATE_S))
        try:
            async with self.http.get(f"{self.upstream}/kv_snapshot") as reply:
                body = await reply.read()
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway from error
        if harm == "late_and_old":
            await asyncio.sleep(self.rng.uniform(0, LATE_S))
        if harm == "cut":
            body = body[: self.rng.randrange(len(body))]
        return web.Response(body=body, content_type="application/msgpack")

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        url = f"{self.upstream}{request.rel_url}"
        answer = web.StreamResponse()
        try:
            async with self.http.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            ) as reply:
                kept = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
                answer = web.StreamResponse(status=reply.status, headers=kept)
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
        except (aiohttp.ClientError, ConnectionError) as error:
            if not answer.prepared:
                raise web.HTTPBadGateway from error
            if request.transport is not None:  # cut off in the middle, as by the engine
                request.transport.abort()
        return answer

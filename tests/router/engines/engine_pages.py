"""Serves an engine's HTTP pages in tests: a real server that answers as documented, or
with faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from router.engines.adapter import RankLoad
from router.engines.worker_spec import parse_worker_spec
from router.fleet.recognize import Recognized, recognize
from tests.served_app import served_by

MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 8192}]}
HANGS = object()  # a page that never comes
CUT = object()  # a page whose connection is closed in the middle
# path, or "POST path" -> JSON, text, bytes, a status alone, one of these two, or a function that
# waits and returns one of them
Pages = Mapping[str, Any]


@asynccontextmanager
async def engine(pages: Pages, asked: list[str] | None = None) -> AsyncIterator[str]:
    """Yield the URL of an engine that serves `pages`, and records requested paths in `asked`."""
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        key = request.path if request.method == "GET" else f"{request.method} {request.path}"
        if asked is not None:
            asked.append(key)
        page = pages.get(key)
        if callable(page):
            page = await page()
        if page is HANGS:
            await over.wait()
        if isinstance(page, web.Response):
            return page
        if page is CUT:
            return await _cut(request)
        if page is None or page is HANGS:
            return web.Response(status=404)
        if isinstance(page, int):
            return web.Response(status=page, headers={"Location": "/v1/models"})
        if isinstance(page, str | bytes):
            return web.Response(body=page)
        return web.json_response(page)

    async with served_by(answer) as url:
        try:
            yield url
        finally:
            over.set()


async def _cut(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Length": "1000"})
    await reply.prepare(request)
    await reply.write(b'{"data": [')
    assert request.transport is not None
    request.transport.close()
    return reply


async def recognized(
    pages: Pages, options: str = "", asked: list[str] | None = None, timeout_s: float = 5.0
) -> Recognized:
    """Return what the router recognizes in an engine with these pages and options."""
    async with engine(pages, asked) as url, aiohttp.ClientSession() as http:
        return await recognize(http, parse_worker_spec(url + options), timeout_s)


async def loads_of(pages: Pages, options: str = "") -> Mapping[int, RankLoad]:
    """Return the engine's load, read from the page that recognition chose."""
    async with engine(pages) as url, aiohttp.ClientSession() as http:
        one = await recognize(http, parse_worker_spec(url + options), 5.0)
        assert one.loads is not None
        return await one.loads.read(http, aiohttp.ClientTimeout(total=5.0))

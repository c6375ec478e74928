"""Runs HTTP servers in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def served_app(app: web.Application, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """Yield the URL of an app on loopback, at `port` or at one that the system chooses.

    `options` are those of aiohttp's runner. A handler gets a tenth of a second to finish at the
    end.
    """
    runner = web.AppRunner(app, **{"access_log": None, "shutdown_timeout": 0.1} | options)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def served_by(handler: Any, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """Yield the URL of a server with one handler for all paths; `options` are those of the app."""
    app = web.Application(**options)
    app.router.add_route("*", "/{path:.*}", handler)
    async with served_app(app, port) as url:
        yield url

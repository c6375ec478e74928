"""A door before a tiny application that hands everything to a scripted worker."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from aiohttp import web

from router.server.parser import RequestLimits
from router.server.responses import answered, errors_as_json
from router.server.server import Door, DoorSite, DoorTerms
from router.upstream.client_reply import SERVER_OPTIONS
from tests.router.relay_support import Handler

LIMITS = RequestLimits(head_bytes=65_536, header_bytes=32_768, body_bytes=1 << 20)
TERMS = DoorTerms(
    connections=1000,
    connections_per_address=0,
    held_bytes=1 << 30,
    head_s=30.0,
    body_s=30.0,
    client_s=30.0,
)


FRONT = "aiohttp"  # or "auto"; set by the fixture `both_fronts`


@dataclass
class Behind:
    """Lifetime: test."""

    door: Door
    port: int
    runner: web.AppRunner


@asynccontextmanager
async def behind(
    handle: Handler,
    limits: RequestLimits = LIMITS,
    trusted: tuple = (),
    tls: ssl.SSLContext | None = None,
    clock=time.monotonic,
    front: str | None = None,
    **terms: float,
) -> AsyncIterator[Behind]:
    """A server on a free port that gives every request to /v1/completions to `handle`.

    `front`: "auto" lets the door answer plain ones itself, as the router's key of that name does;
    None: as the fixture `both_fronts` says.
    """
    now = replace(TERMS, **terms)
    door = Door(limits, lambda: now, trusted, clock)
    app = web.Application(
        client_max_size=1 << 26, middlewares=[errors_as_json(lambda status: None)]
    )
    app.router.add_route("*", "/v1/completions", handle)
    door.guard(app)
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=0.2,
        max_line_size=limits.head_bytes,
        max_field_size=limits.head_bytes,
        **SERVER_OPTIONS,
    )
    await runner.setup()
    try:
        answering = partial(answered, handler=handle, on_fault=lambda status: None)
        hot = {"/v1/completions": answering} if (front or FRONT) == "auto" else {}
        await DoorSite(runner, door, "127.0.0.1", 0, tls=tls, hot=hot).start()
        yield Behind(door, runner.addresses[0][1], runner)
    finally:
        await asyncio.gather(runner.cleanup(), door.drain(0.2))


async def pieces(port: int, *parts: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Send parts one after the other, read until the end."""
    async with asyncio.timeout(20):
        name = None if tls is None else "localhost"
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, server_hostname=name
        )
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

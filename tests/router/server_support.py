"""The server of the client port for tests, on a free port in front of a handler."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from router.http.messages import Answer, Handler, Request
from router.http.parser import RequestLimits
from router.server.client_port import ClientPort
from router.server.server import HttpServer, ServerTerms

LIMITS = RequestLimits(head_bytes=65_536, header_bytes=32_768, body_bytes=1 << 20)
TERMS = ServerTerms(
    connections=1000,
    connections_per_address=0,
    held_bytes=1 << 30,
    head_s=30.0,
    body_s=30.0,
    client_s=30.0,
)


class NoWorkers:
    """A fleet without workers. Lifetime: test."""

    names = None

    def __init__(self) -> None:
        self.faults: list[int] = []

    def faulty(self, status: int) -> None:
        self.faults.append(status)

    def cards(self) -> list[dict[str, Any]]:
        return [{"id": "tiny", "object": "model"}]

    def card(self, name: str) -> dict[str, Any] | None:
        return next((card for card in self.cards() if card["id"] == name), None)

    def ready_workers(self) -> int:
        return 0

    def hangs(self) -> str:
        return ""

    def reasons(self) -> list[str]:
        return []

    def promises(self, model: str | None = None) -> bool:
        return False

    def ready_by_model(self) -> dict[str, int]:
        return {}

    def halves_missing(self) -> dict[str, list[str]]:
        return {}


class AnyMethod(ClientPort):
    """A client port that gives the handler every request to its paths, whatever the method.
    Lifetime: test.
    """

    def __init__(self, handle: Handler, paths: tuple[str, ...] = ("/v1/completions",)) -> None:
        super().__init__(handle, NoWorkers())  # type: ignore[arg-type]
        self.handle = handle
        self.paths = paths

    async def _other(self, request: Request) -> Answer:
        if not self.paths or request.path in self.paths:
            return await self.handle(request)
        return await super()._other(request)


@dataclass
class ServerUnderTest:
    """A server under test and its port. Lifetime: test."""

    server: HttpServer
    port: int


@asynccontextmanager
async def serving(
    handle: Handler,
    limits: RequestLimits = LIMITS,
    trusted: tuple = (),
    tls: ssl.SSLContext | None = None,
    clock=time.monotonic,
    paths: tuple[str, ...] = ("/v1/completions",),
    **terms: float,
) -> AsyncIterator[ServerUnderTest]:
    """Yield a server on a free port that gives requests to `paths` to `handle`; without paths, all
    requests.
    """
    now = replace(TERMS, **terms)
    server = HttpServer(limits, now, trusted, clock)
    try:
        _, port = await server.listen(AnyMethod(handle, paths), "127.0.0.1", 0, tls=tls)
        yield ServerUnderTest(server, port)
    finally:
        await server.aclose(0.2)


async def pieces(port: int, *parts: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Send the parts one after the other and return what comes until the connection ends."""
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

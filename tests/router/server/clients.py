"""Helpers for tests of connections: clients that write bytes by hand, and a clock that the test
moves.
"""

from __future__ import annotations

import asyncio
import re

from router.http.messages import Answer, Request, Response
from tests.router.waiting import until


class Clock:
    """A clock that moves only when the test moves it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def echo_body(request: Request) -> Answer:
    return Response(200, request.body)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def only_connection(it):
    await until(lambda: it.server.connections == 1, "one connection")
    (connection,) = it.server._connections
    return connection


def statuses(got: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+)", got)

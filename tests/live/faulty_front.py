"""A proxy in front of an engine's HTTP port that damages answers in the way that a test sets.

`/health` and every request that is not a POST pass unchanged, so the worker looks healthy although
it is not.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import aiohttp

Harm = Literal[
    "none",
    "reset",
    "cut",
    "torn",
    "garbage",
    "garbled",
    "slow",
    "silent",
    "status_400",
    "status_500",
]
SLOW_S = 0.3  # between two pieces of an answer; the engine itself takes a hundredth of that
_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


@dataclass
class FaultyFront:
    """The damaging proxy. `harm` may change at any time and applies to later answers.

    The harms are: `reset`: the connection ends before the answer; `cut`: it ends after the answer's
    first piece; `torn`: it is reset at any point, also for answers that have begun, and data in
    flight are dropped; `garbage`: the answer is not HTTP; `garbled`: invalid chunks follow the
    first piece; `silent`: nothing is sent until the router hangs up. An answer that is not a stream
    is cut between its head and its body. Lifetime: test.
    """

    upstream: str
    http: aiohttp.ClientSession
    harm: Harm = "none"
    slow_s: float = SLOW_S
    harmed: int = 0
    left: int = 0  # requests kept in silence whose router hung up
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            method, path, _ = lines[0].split(" ", 2)
            headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
            sizes = [int(v) for k, v in headers.items() if k.lower() == "content-length"]
            body = await reader.readexactly(sizes[0]) if sizes else b""
            kept = {k: v for k, v in headers.items() if k.lower() not in _HOP}
            if self._harm_of(method, path) == "silent":
                self.harmed += 1
                await reader.read()
                self.left += 1
            else:
                await self._answer(method, path, kept, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, aiohttp.ClientError):
            pass
        finally:
            writer.close()

    def _harm_of(self, method: str, path: str) -> str:
        """Return the harm for this request, or "" for the router's probes, which pass unchanged."""
        return self.harm if method == "POST" and not path.endswith("/render") else "none"

    async def _answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        out: asyncio.StreamWriter,
    ) -> None:
        harm = self._harm_of(method, path)
        self.harmed += harm != "none"
        if harm == "reset":
            _reset(out)
        elif harm == "garbage":
            out.write(b"\x00\x01 this is no HTTP\r\n\r\n")
        elif harm in ("status_400", "status_500"):
            head = b"HTTP/1.1 %s X\r\nContent-Type: application/json\r\n" % harm[-3:].encode()
            out.write(head + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
        else:
            asked = self.http.request(method, f"{self.upstream}{path}", data=body, headers=headers)
            async with asked as reply:
                await self._pass(reply, harm, out)
        if not out.transport.is_closing():
            await out.drain()

    async def _pass(
        self, reply: aiohttp.ClientResponse, harm: Harm, out: asyncio.StreamWriter
    ) -> None:
        kind = reply.headers.get("Content-Type", "application/json").encode()
        head = b"HTTP/1.1 %d X\r\nContent-Type: %s\r\n" % (reply.status, kind)
        out.write(head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        if harm in ("cut", "garbled") and not kind.startswith(b"text/event-stream"):
            _reset(out)  # a client must not see a part of an answer in one piece
            return
        async for piece in reply.content.iter_any():
            if harm == "slow":
                await asyncio.sleep(self.slow_s)
            if self.harm == "torn":
                self.harmed += harm != "torn"
                _reset(out)
                return
            out.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await out.drain()
            if harm == "cut":
                out.transport.close()  # what was written still arrives
                return
            if harm == "garbled":
                out.write(b"zz\r\nthis is no chunk\r\n")
                return
        out.write(b"0\r\n\r\n")


def _reset(out: asyncio.StreamWriter) -> None:
    sock = out.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    out.transport.abort()


@asynccontextmanager
async def faulty(upstream: str, http: aiohttp.ClientSession) -> AsyncIterator[FaultyFront]:
    """Yield a proxy in front of `upstream` that does no harm yet."""
    front = FaultyFront(upstream, http)
    server = await asyncio.start_server(front.serve, "127.0.0.1", 0)
    front.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield front
    finally:
        server.close()

"""A program that answers hostile clients as cheaply as possible, as a baseline.

    python -m tests.live.hostile.null_server

It answers the first bytes of each connection with 400 and drops the rest. The waits of good clients
at a router on the same machine, while attackers are at this server, are the cost of the attack
itself. The program prints its port.
"""

from __future__ import annotations

import asyncio
from typing import cast

import uvloop

_ANSWER = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Refusing(asyncio.Protocol):
    """Answers the first bytes of a connection with 400 and closes it. Lifetime: connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._answered = False

    def data_received(self, data: bytes) -> None:
        if not self._answered:
            self._answered = True
            self._transport.write(_ANSWER)
            self._transport.write_eof()  # closed with bytes unread, the client would see a reset


async def main() -> None:
    """Serve connections until killed."""
    server = await asyncio.get_running_loop().create_server(Refusing, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())

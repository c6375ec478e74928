"""The end of a router that starts: is there one before it, and what does it leave?

Asked before the event loop runs, so it may wait; the one before goes on serving meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec

from router.takeover.estate import (
    GONE,
    HEAD,
    HELLO,
    MOST_BYTES,
    MOST_SOCKETS,
    SERVING,
    SOCKETS_AT_ONCE,
    Estate,
)
from router.takeover.sockets import close_all

_ANSWERS_S = 60.0  # it saves what it knows first
_GONE_S = 10.0


class Inheritance:
    """What the router before left, and the line to it. Lifetime: until this router serves."""

    def __init__(
        self,
        line: socket.socket,
        estate: Estate,
        client: list[socket.socket],
        admin: list[socket.socket],
    ) -> None:
        self.estate = estate
        self.client = client
        self.admin = admin
        self._line = line

    async def serving(self) -> None:
        """Tell it that we serve; returns once it accepts nothing more, or has ended."""
        loop = asyncio.get_running_loop()
        self._line.setblocking(False)
        try:
            async with asyncio.timeout(_GONE_S):
                await loop.sock_sendall(self._line, SERVING)
                await loop.sock_recv(self._line, len(GONE))
        except (OSError, TimeoutError):
            pass  # it ended, or hangs: both listen then, and both serve
        finally:
            self._line.close()


def take_over(path: Path) -> Inheritance | None:
    """What the router that waits at `path` leaves; None where there is none.

    Raises OSError that says what is wrong with the one there.
    """
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(_ANSWERS_S)
    try:
        line.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        line.close()
        return None
    except OSError as error:
        line.close()
        raise OSError(f"takeover: cannot ask at {path}: {error.strerror or error}") from error
    try:
        line.sendall(HELLO)
        (size,) = HEAD.unpack(_exactly(line, HEAD.size))
        if size > MOST_BYTES:
            raise OSError(f"an estate of {size} bytes")
        estate = msgspec.json.decode(_exactly(line, size), type=Estate)
        sockets = _sockets(line, estate.client_sockets + estate.admin_sockets)
    except (OSError, msgspec.DecodeError) as error:
        line.close()
        raise OSError(f"takeover: the router at {path} does not hand over: {error}") from error
    clients = estate.client_sockets
    return Inheritance(line, estate, sockets[:clients], sockets[clients:])


def _exactly(line: socket.socket, size: int) -> bytes:
    """Raises OSError. Never reads on into the bytes that sockets come with."""
    data = b""
    while len(data) < size:
        more = line.recv(size - len(data))
        if not more:
            raise OSError("it hung up")
        data += more
    return data


def _sockets(line: socket.socket, count: int) -> list[socket.socket]:
    """Raises OSError."""
    if not 0 < count <= MOST_SOCKETS:
        raise OSError(f"{count} sockets")
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            data, numbers, _, _ = socket.recv_fds(line, 1, SOCKETS_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
            if not data or not numbers:
                raise OSError("it hung up")
            sockets += [socket.socket(fileno=number) for number in numbers]
    except OSError:
        close_all(sockets)
        raise
    for one in sockets:
        one.setblocking(False)
    return sockets

"""The end of the running router: somebody comes to follow it, and it hands over.

Nothing changes until the follower says that it serves: one that ends before leaves no trace.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from router.takeover.estate import GONE, HEAD, HELLO, SERVING, SOCKETS_AT_ONCE, Estate, Worker

log = logging.getLogger(__name__)

_ASKS_S = 10.0  # for somebody who connects to say what it wants
_SERVES_S = 120.0  # for a follower to serve
_PEER = struct.Struct("3i")  # process, user, group (SO_PEERCRED)


@dataclass(frozen=True, slots=True)
class Left:
    """What there is to hand over. Lifetime: one handing over."""

    client: Sequence[socket.socket]
    admin: Sequence[socket.socket]
    added: tuple[str, ...] = ()
    workers: tuple[Worker, ...] = ()
    found: tuple[tuple[str, str], ...] = ()


class Handing:
    """Waits at a Unix socket for a follower. Lifetime: process."""

    def __init__(
        self,
        path: Path,
        leave: Callable[[], Awaitable[Left]],
        handed: Callable[[], Awaitable[None]],
    ) -> None:
        """`leave` writes down what is known and says what there is; `handed` accepts nothing more,
        and is awaited before the follower hears of it.
        """
        self._path = path
        self._leave = leave
        self._handed = handed
        self._socket: socket.socket | None = None
        self._inode = 0
        self._waiting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Wait from now on; whoever was there before is not asked any more. Raises OSError."""
        new = self._path.with_name(self._path.name + f".{os.getpid()}")
        with suppress(FileNotFoundError):
            new.unlink()
        one = socket.socket(socket.AF_UNIX)
        try:
            one.bind(str(new))
            os.chmod(new, 0o600)
            one.listen(1)
            one.setblocking(False)
            self._inode = new.stat().st_ino
            new.replace(self._path)
        except OSError as error:
            one.close()
            with suppress(OSError):
                new.unlink()
            why = error.strerror or str(error)
            raise OSError(f"takeover: cannot listen at {self._path}: {why}") from error
        self._socket = one
        self._waiting = asyncio.create_task(self._wait(one), name="takeover")

    async def aclose(self) -> None:
        """Nobody can follow any more."""
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._waiting.cancel()
            await asyncio.wait([self._waiting])
        if self._socket is not None:
            self._socket.close()
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:  # else it is the follower's
                    self._path.unlink()

    async def _wait(self, one: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(one)
            with peer:
                peer.setblocking(False)
                try:
                    if await self._hand_over(peer):
                        return
                except TimeoutError:
                    log.error("takeover: the follower was silent for too long; this router goes on")
                except (OSError, EOFError) as error:
                    log.error("takeover: the follower left (%s); this router goes on", error)

    async def _hand_over(self, peer: socket.socket) -> bool:
        """Whether it was done."""
        pid, user, _ = _PEER.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        )
        if user not in (0, os.geteuid()):
            log.error("takeover: refused process %d, which is user %d", pid, user)
            return False
        async with asyncio.timeout(_ASKS_S):
            await _expect(peer, HELLO)
        log.info("takeover: process %d wants to follow", pid)
        left = await self._leave()
        await _tell(peer, left)
        async with asyncio.timeout(_SERVES_S):
            await _expect(peer, SERVING)
        await self._handed()
        log.info("takeover: process %d serves; what runs here may end", pid)
        with suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(peer, GONE)
        return True


async def _tell(peer: socket.socket, left: Left) -> None:
    sockets = [*left.client, *left.admin]
    estate = Estate(len(left.client), len(left.admin), left.added, left.workers, left.found)
    data = msgspec.json.encode(estate)
    await asyncio.get_running_loop().sock_sendall(peer, HEAD.pack(len(data)) + data)
    for first in range(0, len(sockets), SOCKETS_AT_ONCE):
        numbers = [one.fileno() for one in sockets[first : first + SOCKETS_AT_ONCE]]
        socket.send_fds(peer, [b"."], numbers)


async def _expect(peer: socket.socket, wanted: bytes) -> None:
    """Raises EOFError for anything else."""
    loop, came = asyncio.get_running_loop(), b""
    while len(came) < len(wanted):
        data = await loop.sock_recv(peer, len(wanted) - len(came))
        if not data:
            raise EOFError("it hung up")
        came += data
    if came != wanted:
        raise EOFError(f"it said {came!r}, which is not {wanted!r}")

"""Lets a running router hand its sockets and its knowledge to a new router, without downtime.

The new router connects to a Unix socket and sends `HELLO`. The running router replies with four
bytes, the length of a `RestartHandover` in little-endian order, and then with the `RestartHandover`
itself as JSON. Then it sends its listening sockets in messages of one byte, with up to 64 sockets
in each message (SCM_RIGHTS, unix(7)). The sockets of the client ports come first, then those of the
admin port.

When the new router is ready to serve, it sends `SERVING`. Then the running router stops accepting
connections, and sends `GONE`. If the handover says `tells`, the running router also reports its
open requests to the new one, beginning after the last socket (`router/replicas/former.py`). Then it
sends an empty frame in place of `GONE`.

The running router changes nothing until it receives `SERVING`. So a new router that dies before has
no effect. `take_over` may block, because the new router calls it before its event loop runs, while
the running router still serves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from policies.facts import Role
from router.server.sockets import close_all

HELLO = b"warmroute takeover 1\n"
SERVING = b"serving\n"
GONE = b"gone\n"
HEAD = struct.Struct("<I")
MOST_BYTES = 8 << 20  # of a handover: 4,096 workers of 2 KB
SOCKETS_AT_ONCE = 64  # Linux lets 253 pass in one message
MOST_SOCKETS = 4_096


class HandoverWorker(msgspec.Struct, frozen=True):
    """One worker, or one rank of its engine, in the fleet of the running router."""

    name: str  # URL, or URL#rank
    draining: bool
    ready: bool
    known: bool  # all of its cache is
    turned: Role | None = None  # the role that it took while it ran


class RestartHandover(msgspec.Struct, frozen=True):
    """The data that the next router gets from the running router, besides sockets and files
    (`kv_state`).
    """

    client_sockets: int
    admin_sockets: int
    added: tuple[str, ...]  # workers added by hand, as `parse_worker_spec` reads them
    workers: tuple[HandoverWorker, ...]
    found: tuple[tuple[str, str], ...] = ()  # (source of discovery, worker that counts as present)
    tells: bool = False  # its requests, from here on
    shares: str = ""  # where it shares state, and so is heard of there, too
    lines: tuple[str, ...] = ()  # the same of each router before it that has not ended


log = logging.getLogger(__name__)

_ASKS_S = 10.0  # for a connected process to send its request
_SERVES_S = 120.0  # for a follower to serve
_PEER = struct.Struct("3i")  # process, user, group (SO_PEERCRED)


class RequestReporter(Protocol):
    """Reports this router's requests to the router that replaces it
    (`router.replicas.former.OpenRequestReporter`). Lifetime: connection.
    """

    def start(self) -> None:
        """Begin to report requests."""

    async def handed(self) -> None:
        """Report that this router accepts no more requests."""

    async def aclose(self) -> None:
        """Stop reporting."""


class HandoverServer:
    """Waits at a Unix socket for the router that will replace this one. Lifetime: process."""

    def __init__(
        self,
        path: Path,
        leave: Callable[[], Awaitable[tuple[RestartHandover, list[socket.socket]]]],
        handed: Callable[[], Awaitable[None]],
        telling: Callable[[socket.socket], RequestReporter] | None = None,
    ) -> None:
        """Make a server that does not wait yet.

        `leave` saves what is known and returns what to hand over. `handed` stops accepting
        requests; it is awaited before the new router is told so. `telling` gets the connection to a
        new router, if the handover says that it `tells`.
        """
        self._path = path
        self._leave = leave
        self._handed = handed
        self._begin_telling = telling
        self._telling: RequestReporter | None = None  # to the router that follows
        self._socket: socket.socket | None = None
        self._inode = 0
        self._waiting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Wait for a new router from now on, in place of the router that waited at this path
        before. Raises OSError if that fails.
        """
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
            raise OSError(f"hot_restart: cannot listen at {self._path}: {why}") from error
        self._socket = one
        self._waiting = asyncio.create_task(self._wait(one), name="hot restart")

    async def aclose(self) -> None:
        """Stop waiting for a new router."""
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._waiting.cancel()
            await asyncio.wait([self._waiting])
        if self._socket is not None:
            self._socket.close()
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:  # else it is the follower's
                    self._path.unlink()
        if self._telling is not None:
            await self._telling.aclose()

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
                    log.error("hot_restart: the follower was silent too long; this router goes on")
                except (OSError, EOFError) as error:
                    log.error("hot_restart: the follower left (%s); this router goes on", error)

    async def _hand_over(self, peer: socket.socket) -> bool:
        """Hand sockets and data over to the process at the other end. Return whether that
        succeeded.
        """
        pid, user, _ = _PEER.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        )
        if user not in (0, os.geteuid()):
            log.error("hot_restart: refused process %d, which is user %d", pid, user)
            return False
        async with asyncio.timeout(_ASKS_S):
            await _expect(peer, HELLO)
        log.info("hot_restart: process %d wants to follow", pid)
        await _send_handover(peer, *await self._leave())
        if self._begin_telling is not None:
            self._telling = self._begin_telling(peer.dup())
            self._telling.start()
        try:
            async with asyncio.timeout(_SERVES_S):
                await _expect(peer, SERVING)
        except (OSError, EOFError):
            if self._telling is not None:
                await self._telling.aclose()
            self._telling = None
            raise
        await self._handed()
        log.info("hot_restart: process %d serves; what runs here may end", pid)
        if self._telling is not None:
            await self._telling.handed()
            return True
        with suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(peer, GONE)
        return True


async def _send_handover(
    peer: socket.socket, handover: RestartHandover, sockets: list[socket.socket]
) -> None:
    data = msgspec.json.encode(handover)
    await asyncio.get_running_loop().sock_sendall(peer, HEAD.pack(len(data)) + data)
    ports = len(sockets) - len(handover.lines)
    for some in (sockets[:ports], sockets[ports:]):
        for first in range(0, len(some), SOCKETS_AT_ONCE):
            numbers = [one.fileno() for one in some[first : first + SOCKETS_AT_ONCE]]
            socket.send_fds(peer, [b"."], numbers)


async def _expect(peer: socket.socket, wanted: bytes) -> None:
    """Wait until exactly these bytes arrive. Raises EOFError if other bytes arrive or the
    connection ends.
    """
    loop, came = asyncio.get_running_loop(), b""
    while len(came) < len(wanted):
        data = await loop.sock_recv(peer, len(wanted) - len(came))
        if not data:
            raise EOFError("it hung up")
        came += data
    if came != wanted:
        raise EOFError(f"it said {came!r}, which is not {wanted!r}")


_ANSWERS_S = 60.0  # for the old router, which first saves its caches
_GONE_S = 10.0


class Predecessor:
    """The connection to the previous router, with the sockets and data that it handed over.
    Lifetime: until this router serves.
    """

    def __init__(
        self,
        line: socket.socket,
        handover: RestartHandover,
        client: list[socket.socket],
        admin: list[socket.socket],
        lines: Sequence[socket.socket] = (),
    ) -> None:
        """Hold what the previous router handed over. `lines` are the connections to still earlier
        routers that have not ended.
        """
        self.handover = handover
        self.client = client
        self.admin = admin
        self._line = line
        self.lines = list(lines)

    @property
    def line(self) -> socket.socket:
        """The connection to the previous router."""
        return self._line

    async def serving(self, gone: Callable[[], Awaitable[None]] | None = None) -> None:
        """Tell the previous router that this router serves. Return once the previous router accepts
        no more requests, or has ended.

        `gone` waits for that if another object reads the connection and keeps it.
        """
        loop = asyncio.get_running_loop()
        self._line.setblocking(False)
        try:
            async with asyncio.timeout(_GONE_S):
                await loop.sock_sendall(self._line, SERVING)
                await (loop.sock_recv(self._line, len(GONE)) if gone is None else gone())
        except (OSError, TimeoutError):
            pass  # it ended, or hangs: both listen then, and both serve
        finally:
            if gone is None:
                self._line.close()


def take_over(path: Path) -> Predecessor | None:
    """Return what the router that waits at `path` hands over; None if no router waits there. Raises
    OSError that says what failed.
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
        raise OSError(f"hot_restart: cannot ask at {path}: {error.strerror or error}") from error
    try:
        line.sendall(HELLO)
        (size,) = HEAD.unpack(_exactly(line, HEAD.size))
        if size > MOST_BYTES:
            raise OSError(f"a handover of {size} bytes")
        handover = msgspec.json.decode(_exactly(line, size), type=RestartHandover)
        sockets = _sockets(line, handover.client_sockets + handover.admin_sockets)
        lines = _sockets(line, len(handover.lines)) if handover.lines else []
    except (OSError, msgspec.DecodeError) as error:
        line.close()
        raise OSError(f"hot_restart: the router at {path} does not hand over: {error}") from error
    clients = handover.client_sockets
    return Predecessor(line, handover, sockets[:clients], sockets[clients:], lines)


def _exactly(line: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes, without reading the bytes after them, which come with sockets.
    Raises OSError if the connection ends.
    """
    data = b""
    while len(data) < size:
        more = line.recv(size - len(data))
        if not more:
            raise OSError("it hung up")
        data += more
    return data


def _sockets(line: socket.socket, count: int) -> list[socket.socket]:
    """Return `count` sockets from the connection. Raises OSError if they do not arrive."""
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


class Successor:
    """The process that this router starts at `SIGUSR2`, and that takes over from it. Lifetime:
    process.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        """Start no process yet. `argv` has the arguments of this router's command."""
        self._argv = list(argv)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the new process, unless one is starting already. It takes over without further
        calls.
        """
        if self._process is not None and self._process.poll() is None:
            log.warning("SIGUSR2: process %d is about to follow already", self._process.pid)
            return
        command = [sys.executable, "-P", "-m", "router", *self._argv]
        # The successor has another process number, and must notify systemd's watchdog, too.
        environment = {name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"}
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        except OSError as error:
            log.error("SIGUSR2: no follower can be started: %s", error)
            return
        log.info("SIGUSR2: process %d is started to follow", self._process.pid)
        threading.Thread(target=_reap, args=(self._process,), daemon=True).start()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the new process and log it. If the new process succeeds, it outlives this
    router.
    """
    status = process.wait()
    log.error("the follower, process %d, ended with status %d", process.pid, status)

"""Where one of several processes sits, and its lifeline to the supervisor.

The lifeline is a socket pair. A child says `ready` there once it serves, and more of what only it
knows; that it closes tells each that the other is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from router.config.schema import Config

LEADER = 0  # its seat
SEAT_ARGUMENTS = 7  # of a child, before the command's own


@dataclass(frozen=True, slots=True)
class Seat:
    """Lifetime: process."""

    number: int  # 0: the leader's
    path: Path  # of the socket at which the leader listens
    port: int  # of clients, shared by all
    admin_port: int
    lifeline: socket.socket
    client: list[socket.socket]  # to listen with
    admin: list[socket.socket]  # the leader's

    @property
    def estate(self) -> Path:
        """The file of what a router before left; there only where one did."""
        return self.path.with_suffix(".estate")

    @property
    def left(self) -> Path:
        """The file of what the leader leaves to a router that follows."""
        return self.path.with_suffix(".left")

    def arguments(self) -> list[str]:
        """This seat as a child's first arguments; its sockets must stay open across exec."""
        where = [str(self.number), str(self.path), str(self.port), str(self.admin_port)]
        sockets = [",".join(str(one.fileno()) for one in share) for share in self._shares]
        return [*where, str(self.lifeline.fileno()), *sockets]

    @property
    def files(self) -> list[int]:
        """Numbers of all its sockets."""
        return [self.lifeline.fileno(), *(one.fileno() for share in self._shares for one in share)]

    @property
    def _shares(self) -> tuple[list[socket.socket], list[socket.socket]]:
        return self.client, self.admin


def at_ports(config: Config, seat: Seat) -> Config:
    """The configuration with the ports that the supervisor got where the system was to choose."""
    port, admin_port = config.port or seat.port, config.admin_port or seat.admin_port
    return msgspec.structs.replace(config, port=port, admin_port=admin_port)


def seat_of(arguments: list[str]) -> Seat:
    """The seat of these arguments, in the child. Raises ValueError or OSError."""
    number, path, port, admin_port, lifeline, *shares = arguments
    client, admin = ([_taken(text) for text in share.split(",") if text] for share in shares)
    line = _taken(lifeline)
    return Seat(int(number), Path(path), int(port), int(admin_port), line, client, admin)


def _taken(number: str) -> socket.socket:
    one = socket.socket(fileno=int(number))
    one.setblocking(False)
    os.set_inheritable(one.fileno(), False)
    return one


class Lifeline(asyncio.Protocol):
    """A child's end, or the supervisor's. Lifetime: process."""

    def __init__(self, on_words: Callable[[list[str]], None], on_lost: Callable[[], None]) -> None:
        """`on_words` is given each line, split; `on_lost` is called once: the other is gone."""
        self._on_words = on_words
        self._on_lost = on_lost
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it stands."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_words(line.decode(errors="replace").split())

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: it is gone."""
        self._transport = None
        self._on_lost()

    def say(self, *words: object) -> None:
        """One line."""
        if self._transport is not None:
            self._transport.write(" ".join(map(str, words)).encode() + b"\n")

    def close(self) -> None:
        """Let go."""
        if self._transport is not None:
            self._transport.close()


async def hold(
    end: socket.socket, on_words: Callable[[list[str]], None], on_lost: Callable[[], None]
) -> Lifeline:
    """Take an end of a lifeline."""
    lifeline = Lifeline(on_words, on_lost)
    await asyncio.get_running_loop().create_connection(lambda: lifeline, sock=end)
    return lifeline

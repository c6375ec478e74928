"""One connection to a worker, as asyncio sees it: it hands what happens to the present exchange."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol, cast


class Receiver(Protocol):
    """What a connection tells the exchange that uses it."""

    @property
    def silent(self) -> bool:
        """The client has seen nothing of the reply that only this worker could go on with."""
        ...

    def feed(self, data: bytes) -> None:
        """Bytes came from the worker."""
        ...

    def lost(self, exc: Exception | None) -> None:
        """The connection ended; `exc` is None for an orderly end."""
        ...

    def writable(self) -> None:
        """The worker has taken enough of the request for more to be written."""
        ...


class Connection(asyncio.Protocol):
    """Lifetime: one TCP (or TLS) connection, over many exchanges, one at a time."""

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        self.transport: asyncio.Transport
        self.idle_since_s = 0.0
        self.lost = False
        self.used = False  # it has carried a whole exchange before the present one
        self._write_paused = False
        self._receiver: Receiver | None = None
        self._on_lost = on_lost

    @property
    def closing(self) -> bool:
        """Nothing can be sent any more."""
        return self.transport.is_closing()

    @property
    def can_write(self) -> bool:
        """The worker takes more now."""
        return not self._write_paused and not self.transport.is_closing()

    def begin(self, receiver: Receiver) -> None:
        """Tell `receiver` what happens from now on, and at once if the end came before it."""
        if self.lost:
            receiver.lost(None)
        else:
            self._receiver = receiver

    def end(self) -> None:
        """The exchange is over; the connection is idle."""
        self._receiver = None
        self.used = True

    def abort(self) -> None:
        """Close at once, whatever is unsent or unread."""
        self._receiver = None
        self.transport.abort()

    def abandon_silent(self) -> None:
        """Close unless the client has seen a part of the reply; the exchange takes it as lost."""
        if self._receiver is None or self._receiver.silent:
            self.transport.abort()

    def pause(self) -> None:
        """Read no more from the worker until `resume`."""
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read from the worker again."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # A worker's machine that vanishes during a long silent prefill is noticed this way.
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            # Nobody asked: what follows could be taken for the answer to the next request.
            self.transport.abort()
        else:
            self._receiver.feed(data)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._receiver is not None:
            self._receiver.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._on_lost(self)
        if self._receiver is not None:
            self._receiver.lost(exc)
            self._receiver = None

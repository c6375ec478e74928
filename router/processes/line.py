"""A line between two processes: messages in frames over a Unix socket.

A frame is a message's length in bytes (32 bits, little endian) and the message. What is said in
one turn of the event loop leaves in one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Generic, TypeVar, cast

import msgspec

log = logging.getLogger(__name__)

Heard = TypeVar("Heard")

FRAME_BYTES = 64 << 20  # longest message: chains of the longest body, and room
_UNREAD_BYTES = 64 << 20  # that the other end may leave unread before it is given up
_LENGTH = Struct("<I")


class GarbageError(Exception):
    """The other end says what makes no sense."""


class Frames(Generic[Heard]):
    """Messages out of bytes as they come. Lifetime: line."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Heard] = msgspec.msgpack.Decoder(kinds)
        self._rest = bytearray()

    def take(self, data: bytes) -> list[Heard]:
        """The messages that are complete now. Raises GarbageError."""
        kept = bool(self._rest)
        if kept:
            self._rest += data
        whole: bytes | bytearray = self._rest if kept else data
        start, heard = 0, []
        try:
            with memoryview(whole) as view:
                while (end := _end_of(whole, start)) is not None:
                    heard.append(self._decoder.decode(view[start + _LENGTH.size : end]))
                    start = end
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise GarbageError(str(error)) from error
        if kept:
            del self._rest[:start]
        elif start < len(data):
            self._rest += data[start:]
        return heard


def _end_of(data: bytes | bytearray, start: int) -> int | None:
    """Where the frame that begins at `start` ends; None while it is not whole."""
    if len(data) - start < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data, start)
    if length > FRAME_BYTES:
        raise GarbageError(f"a message of {length} bytes; at most {FRAME_BYTES}")
    end: int = start + _LENGTH.size + length
    return end if end <= len(data) else None


class Line(asyncio.Protocol, Generic[Heard]):
    """One end of a line. `on_heard` is given the messages that came together, in order;
    `on_lost`, once, why there will be no more. Lifetime: connection.
    """

    def __init__(
        self,
        kinds: Any,
        on_heard: Callable[[Sequence[Heard]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._frames: Frames[Heard] = Frames(kinds)
        self._on_heard = on_heard
        self._on_lost = on_lost
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting = bytearray()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._leaving = False  # a write is due at the end of this turn
        self._trouble = "the other end closed it"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it stands."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        try:
            heard = self._frames.take(data)
            if heard:
                self._on_heard(heard)
        except GarbageError as error:
            self.close(f"garbage: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: it is gone."""
        self._transport = None
        self._on_lost(self._trouble if error is None else str(error))

    def say(self, message: msgspec.Struct) -> None:
        """Send `message` at the end of this turn; after the line's end, nothing happens."""
        if self._transport is None:
            return
        at = len(self._waiting)
        self._waiting += b"\0\0\0\0"
        self._encoder.encode_into(message, self._waiting, -1)
        _LENGTH.pack_into(self._waiting, at, len(self._waiting) - at - _LENGTH.size)
        if not self._leaving:
            self._leaving = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what waits now."""
        self._leaving = False
        if self._transport is None or not self._waiting:
            return
        self._transport.write(self._waiting)
        self._waiting = bytearray()
        if self._transport.get_write_buffer_size() > _UNREAD_BYTES:
            self.close(f"the other end leaves more than {_UNREAD_BYTES} bytes unread")

    def close(self, why: str) -> None:
        """End it now, unsent messages lost; `on_lost` follows."""
        self._trouble = why
        if self._transport is not None:
            self._transport.abort()

    def hang_up(self) -> None:
        """End it after what was said."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

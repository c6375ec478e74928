"""Unpacks zstd as a file is read, and says so where one has been cut short.

The library's own stream reader takes the end of a file for the end of its data, wherever that is.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import zstandard

MAX_WINDOW_BYTES = 128 << 20  # what a reader of an unknown file sets aside at most
PIECE_BYTES = 2048  # four bytes may unpack to 128 KiB: so one piece gives 64 MiB at most


class ZstdReader(io.RawIOBase):
    """The unpacked bytes of `packed`, frame after frame. Lifetime: stream.

    Reading raises EOFError where the last frame is not whole, OSError where the data are damaged.
    """

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._frame: Any = None  # the one under way
        self._rest = b""  # packed bytes after a frame's end
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._unpack_more():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack_more(self) -> bool:
        piece = self._rest or self._packed.read(PIECE_BYTES)
        if not piece:
            if self._frame is not None:
                raise EOFError("ends within a zstd frame: cut short")
            return False
        if self._frame is None:
            self._frame = self._unpacker.decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(piece))
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return True

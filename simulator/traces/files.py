"""A trace file as lines: packed or not, bounded, with how much of it has been read."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from simulator.traces.errors import ErrorLog, TraceError

MAX_LINE_BYTES = 8 << 20
BUFFER_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class TraceFile:
    """An open file, unpacked as its first bytes say (gzip, zstd, else plain). Lifetime: stream.

    Raises `TraceError` when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._raw = cast(BinaryIO, open(path, "rb", opener=_at_once))  # noqa: SIM115
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
        status = os.fstat(self._raw.fileno())
        if not stat.S_ISREG(status.st_mode):
            self._raw.close()
            raise TraceError(f"{path}: is not a regular file")
        self._bytes = status.st_size
        try:
            self._stream = io.BufferedReader(cast(Any, _unpacked(self._raw, path)), BUFFER_BYTES)
        except BaseException:
            self._raw.close()
            raise

    def close(self) -> None:
        """Closes the file; harmless when it is closed."""
        self._stream.close()
        self._raw.close()

    def fraction_read(self) -> float:
        """Share of the file's bytes, as packed, that have been read; 1.0 once it is closed."""
        if self._raw.closed or not self._bytes:
            return 1.0
        return min(1.0, self._raw.tell() / self._bytes)

    def lines(self, errors: ErrorLog) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of all lines but blank ones; too long ones are told `errors`.

        Closes the file at the end. Raises `TraceError` where the file is damaged.
        """
        number = 0
        try:
            while line := self._stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if len(line) > MAX_LINE_BYTES:
                    self._skip_line(line)
                    errors.add(number, f"longer than {MAX_LINE_BYTES} bytes")
                elif not line.isspace():
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{self.path}, after line {number}: damaged: {error}") from error
        finally:
            self.close()

    def _skip_line(self, line: bytes) -> None:
        while line and not line.endswith(b"\n"):
            line = self._stream.readline(MAX_LINE_BYTES)


def _at_once(path: str, flags: int) -> int:
    """Opens a pipe without waiting for somebody to write to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unpacked(raw: BinaryIO, path: Path) -> Any:
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(GZIP_MAGIC):
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if magic == ZSTD_MAGIC:
        return _zstd(raw, path)
    return raw


def _zstd(raw: BinaryIO, path: Path) -> Any:
    try:
        from simulator.traces.zstd import ZstdReader
    except ModuleNotFoundError as error:
        raise TraceError(
            f"{path}: is packed with zstd; install warmroute[sim], or unpack it"
        ) from error
    return ZstdReader(raw)

"""Reads a trace from one file or several as lines of bounded length, compressed or not."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from router.config.paths import unreadable
from simulator import DATA
from simulator.traces.job import ErrorLog, TraceError

MAX_WINDOW_BYTES = 128 << 20  # what a reader of an unknown file sets aside at most
PIECE_BYTES = 2048  # four bytes may unpack to 128 KiB: so one piece gives 64 MiB at most


class ZstdReader(io.RawIOBase):
    """The decompressed bytes of `packed`, frame after frame.

    Reading raises EOFError if the last frame is not whole, OSError if the data are damaged.
    Lifetime: stream.
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


MAX_LINE_BYTES = 8 << 20
BUFFER_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class TraceFile:
    """An open file; its first bytes say whether it is gzip, zstd or plain. Lifetime: stream.

    Raises `TraceError` when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._raw = cast(BinaryIO, open(path, "rb", opener=_at_once))  # noqa: SIM115
        except OSError as error:
            raise TraceError(unreadable(path, error)) from error
        status = os.fstat(self._raw.fileno())
        if not stat.S_ISREG(status.st_mode):
            self._raw.close()
            raise TraceError(f"{path}: is not a regular file")
        self._bytes = status.st_size
        try:
            self._stream = io.BufferedReader(cast(Any, _unpacked(self._raw)), BUFFER_BYTES)
        except BaseException:
            self._raw.close()
            raise

    def close(self) -> None:
        """Close the file; it may be closed already."""
        self._stream.close()
        self._raw.close()

    def fraction_read(self) -> float:
        """Return the share of the file's (compressed) bytes that have been read; 1.0 once it is
        closed.
        """
        if self._raw.closed or not self._bytes:
            return 1.0
        return min(1.0, self._raw.tell() / self._bytes)

    def lines(self, errors: ErrorLog) -> Iterator[tuple[int, bytes]]:
        """Yield (number from 1, line) of all lines that are not blank.

        Lines that are too long are added to `errors`. The file is closed at the end. Raises
        `TraceError` if the file is damaged.
        """
        number = 0
        try:
            while line := self._stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if len(line) > MAX_LINE_BYTES:
                    self._skip_line(line)
                    array = "; `jq -c '.[]' FILE` makes lines of a JSON array"
                    is_array = line.lstrip()[:1] == b"["
                    errors.add(number, f"longer than {MAX_LINE_BYTES} bytes{array * is_array}")
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
    """Open a file or a pipe without waiting for another process to write to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unpacked(raw: BinaryIO) -> Any:
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(GZIP_MAGIC):
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if magic == ZSTD_MAGIC:
        return ZstdReader(raw)
    return raw


PATTERNS = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst")  # the files of a folder that are parts
_PACKINGS = (".gz", ".zst")


class TraceParts:
    """Reads several files one after the other; line numbers continue from one file to the next.
    Each file is opened when it is reached: a part may be compressed or begun while others are read.
    Lifetime: stream.
    """

    def __init__(self, path: Path, parts: Sequence[Path]) -> None:
        """Keep the files `parts` of the trace that the user named as `path`. Raises `TraceError`
        for a part that cannot be opened.
        """
        self.path = path
        self._parts = parts
        self._sizes = [_size(part) for part in parts]
        self._done_bytes = 0
        self._open: TraceFile | None = None

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._open is not None:
            self._open.close()

    def fraction_read(self) -> float:
        """Return the share of all parts' (compressed) bytes that have been read."""
        total = sum(self._sizes)
        if not total:
            return 1.0
        at = 0 if self._open is None else self._sizes[self._parts.index(self._open.path)]
        share = 0.0 if self._open is None else self._open.fraction_read()
        return min(1.0, (self._done_bytes + share * at) / total)

    def lines(self, errors: ErrorLog) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of all parts, as `TraceFile.lines` does for one file."""
        before = number = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            self._open = TraceFile(part)
            for in_part, line in self._open.lines(errors):
                number = before + in_part
                if not line.endswith(b"\n"):
                    errors.unended_line = number
                yield number, line
            before = number
            self._open = None
            self._done_bytes += size


def opened(path: Path) -> TraceParts:
    """Open the file at `path`, or the parts in that folder or matching that pattern, sorted by
    name.

    Raises `TraceError` if there is none, or if it cannot be read.
    """
    path = located(path)
    return TraceParts(path, parts_of(path) or [path])


def located(path: Path) -> Path:
    """Return the path itself, or the installed file of a sample.

    Pages call a sample `simulator/data/NAME`, which exists only in a checkout.
    """
    installed = DATA / path.name
    if path.parent == Path("simulator", "data") and not path.exists() and installed.is_file():
        return installed
    return path


def parts_of(path: Path) -> list[Path] | None:
    """Return the parts in a folder or matching a pattern (`*`, `?`, `[...]`), sorted by name.

    Returns None if `path` is a file. Raises `TraceError` if there is no part.
    """
    if path.is_dir():
        found = {part for pattern in PATTERNS for part in path.glob(pattern)}
        where = f"{path}: holds no part of a trace ({', '.join(PATTERNS)})"
    elif has_magic(str(path)) and not path.exists():
        found = {Path(name) for name in glob(str(path)) if not Path(name).is_dir()}
        where = f"{path}: no file has such a name"
    else:
        return None
    packed = {part.with_suffix("") for part in found if part.suffix in _PACKINGS}
    kept = sorted(part for part in found if part not in packed and _size(part))
    if not kept:
        raise TraceError(where)
    return kept


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise TraceError(unreadable(path, error)) from error

"""A trace in one file or several as bounded lines, packed or not."""

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
    """Opens a pipe without waiting for somebody to write to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unpacked(raw: BinaryIO) -> Any:
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(GZIP_MAGIC):
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if magic == ZSTD_MAGIC:
        return ZstdReader(raw)
    return raw


PATTERNS = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst")  # what of a folder counts as a part
_PACKINGS = (".gz", ".zst")


class TraceParts:
    """Files one after the other; lines are counted through. Lifetime: stream.

    Each is opened when it is reached: a part may be packed or begun while others are read.
    """

    def __init__(self, path: Path, parts: Sequence[Path]) -> None:
        """`path`: as it was asked for. Raises `TraceError` for a part that cannot be opened."""
        self.path = path
        self._parts = parts
        self._sizes = [_size(part) for part in parts]
        self._done_bytes = 0
        self._open: TraceFile | None = None

    def close(self) -> None:
        """Closes what is open; harmless when nothing is."""
        if self._open is not None:
            self._open.close()

    def fraction_read(self) -> float:
        """Share of all parts' bytes, as packed, that have been read."""
        total = sum(self._sizes)
        if not total:
            return 1.0
        at = 0 if self._open is None else self._sizes[self._parts.index(self._open.path)]
        share = 0.0 if self._open is None else self._open.fraction_read()
        return min(1.0, (self._done_bytes + share * at) / total)

    def lines(self, errors: ErrorLog) -> Iterator[tuple[int, bytes]]:
        """As `TraceFile.lines`, of all parts."""
        before = number = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            self._open = TraceFile(part)
            for in_part, line in self._open.lines(errors):
                number = before + in_part
                yield number, line
            before = number
            self._open = None
            self._done_bytes += size


def opened(path: Path) -> TraceParts:
    """The file at `path`, or the parts in that folder or of that pattern, by name.

    Raises `TraceError` where there is none, or it cannot be read.
    """
    path = located(path)
    return TraceParts(path, parts_of(path) or [path])


def located(path: Path) -> Path:
    """The path itself; of `simulator/data/NAME`, as pages call the sample, outside the checkout the
    installed file.
    """
    installed = DATA / path.name
    if path.parent == Path("simulator", "data") and not path.exists() and installed.is_file():
        return installed
    return path


def parts_of(path: Path) -> list[Path] | None:
    """The parts in a folder or of a pattern (`*`, `?`, `[...]`), by name; None: `path` is a file.

    Raises `TraceError` where there is none.
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

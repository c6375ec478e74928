"""The file of saved streams: one record a worker, each behind its lengths, with its checksum.

    "warmroute-kv", version (4 bytes, big-endian), records, the last one without a body
    record: bytes of the head (4), of the body (8), head, body, XXH3-64 of head and body (8)
    head: a msgpack map of `Head`; of the last record, of `End`
    body: `WorkerBlocks.dump`

It is written beside its name and takes its place when it is whole, so that a router that dies
while it writes leaves the file before.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from xxhash import xxh3_64

from policies.facts import SavedStream

MAGIC = b"warmroute-kv"
VERSION = 1
MAX_FILE_BYTES = 8 << 30  # about 300 million blocks
MAX_HEAD_BYTES = 1 << 20
MAX_WORKERS = 4_096

_VERSION = struct.Struct(">I")
_LENGTHS = struct.Struct(">IQ")
_SUM = struct.Struct(">Q")


class SavedFileError(ValueError):
    """The file is none that was saved, or is damaged; the text says where."""


class Owner(msgspec.Struct, frozen=True):
    """Whose stream it is: the same worker where all of this is the same."""

    url: str
    rank: int | None  # what its engine calls its data-parallel rank
    kind: str
    models: tuple[str, ...]
    block_size: int


class Head(msgspec.Struct, frozen=True):
    """What stands before the blocks of a worker: how far its stream went."""

    owner: Owner
    next_seq: int
    digest: int
    known: bool
    saved_at: float = 0.0  # seconds since the epoch


class End(msgspec.Struct, frozen=True):
    """How many workers there must be."""

    workers: int


class Saved(NamedTuple):
    """One worker of the file."""

    head: Head
    blocks: bytes

    @property
    def stream(self) -> SavedStream:
        """For the core."""
        head = self.head
        return SavedStream(head.next_seq, head.digest, head.known, self.blocks)


class SavedFile:
    """A file that is being written; used by one thread at a time. Lifetime: one saving."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self._new = path.with_name(path.name + ".new")
        self._file = os.fdopen(_open_private(self._new), "wb")
        self._workers = 0
        self._file.write(MAGIC + _VERSION.pack(VERSION))

    def add(self, saved: Saved) -> None:
        """Write one worker. Raises OSError."""
        self._workers += 1
        self._record(msgspec.msgpack.encode(saved.head), saved.blocks)

    def finish(self) -> int:
        """Make it take the place of the one before; returns its bytes. Raises OSError."""
        self._record(msgspec.msgpack.encode(End(self._workers)), b"")
        self._file.flush()
        os.fsync(self._file.fileno())
        size_bytes = self._file.tell()
        self._file.close()
        os.replace(self._new, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return size_bytes

    def abandon(self) -> None:
        """Leave the file before as it is."""
        with suppress(OSError):  # what could not be written cannot be flushed either
            self._file.close()
        self._new.unlink(missing_ok=True)

    def _record(self, head: bytes, body: bytes) -> None:
        digest = xxh3_64(head)
        digest.update(body)
        self._file.write(_LENGTHS.pack(len(head), len(body)) + head)
        self._file.write(body)
        self._file.write(_SUM.pack(digest.intdigest()))


def read_saved(path: Path) -> list[Saved]:
    """All workers of a file. Raises OSError, and SavedFileError for what is none of ours."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        if left > MAX_FILE_BYTES:
            raise SavedFileError(f"it has {left} bytes; at most {MAX_FILE_BYTES}")
        if file.read(len(MAGIC)) != MAGIC:
            raise SavedFileError("it does not begin as one")
        (version,) = _VERSION.unpack(_exactly(file, _VERSION.size))
        if version != VERSION:
            raise SavedFileError(f"it is of version {version}; expected {VERSION}")
        return _records(file)


def _records(file: BinaryIO) -> list[Saved]:
    found: list[Saved] = []
    try:
        while (record := _record(file, len(found))) is not None:
            found.append(record)
            if len(found) > MAX_WORKERS:
                raise SavedFileError(f"it has more than {MAX_WORKERS} workers")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SavedFileError(f"worker {len(found)}: {error}") from error
    return found


def _record(file: BinaryIO, number: int) -> Saved | None:
    """The next worker; None at the end."""
    head_bytes, body_bytes = _LENGTHS.unpack(_exactly(file, _LENGTHS.size))
    left = os.fstat(file.fileno()).st_size - file.tell()
    if head_bytes > MAX_HEAD_BYTES or head_bytes + body_bytes > left:
        raise SavedFileError(f"worker {number} has more bytes than the file")
    head, body = _exactly(file, head_bytes), _exactly(file, body_bytes)
    digest = xxh3_64(head)
    digest.update(body)
    if digest.digest() != _exactly(file, _SUM.size):
        raise SavedFileError(f"worker {number}: the checksum is another one")
    if not body:
        end = msgspec.msgpack.decode(head, type=End)
        if end.workers != number or file.read(1):
            raise SavedFileError(f"it ends after {number} workers; expected {end.workers}")
        return None
    known = msgspec.msgpack.decode(head, type=Head)
    if known.next_seq < 1 or not 0 < known.digest < 1 << 64:
        raise SavedFileError(f"worker {number}: goes on from batch {known.next_seq}")
    return Saved(known, body)


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise SavedFileError("it is cut off")
    return data


def _open_private(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

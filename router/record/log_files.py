"""Writes log files and folders to which lines are only appended, in a thread of their own."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import re
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from router.record.logs import worth_a_line
from router.record.salt import Salt, salt_in

log = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_EVERY_S = 0.1  # the thread looks this often; a call that woke it would cost the event loop more
_CLOSE_S = 5.0  # a disk that hangs must not keep the router from ending
_BATCH_ITEMS = 64  # written at once: other threads get a turn in between


class Sink(Protocol[T_contra]):
    """Receives queued items in the log's thread, and handles errors of files itself."""

    def write(self, items: Sequence[T_contra]) -> None:
        """Write the next items, which are in the order in which they were queued."""

    def reopen(self) -> None:
        """Open the file again, because it may have been moved."""

    def close(self) -> None:
        """Close the file; no items follow."""


class Background(Generic[T]):
    """A queue whose items a thread of its own passes to a sink; one other thread fills the queue.
    Lifetime: process.
    """

    def __init__(self, name: str, sink: Sink[T], items_max: int, bytes_max: int) -> None:
        self._sink = sink
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._items: deque[tuple[T, int]] = deque()
        # One thread writes each of them; their difference is the number of waiting items.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._wake = threading.Event()
        self._reopen = threading.Event()
        self._stop = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T, size_bytes: int) -> bool:
        """Queue an item that uses about `size_bytes` of memory. Return False if the queue is full
        and the item is lost.
        """
        items = self._items
        waiting_bytes = self._put_bytes - self._taken_bytes
        if len(items) >= self._items_max or waiting_bytes > self._bytes_max or self._broken:
            return False
        items.append((item, size_bytes))
        self._put_bytes += size_bytes
        if len(items) * 2 == self._items_max:
            self._wake.set()
        return True

    def reopen(self) -> None:
        """Make the sink open its file again soon. Returns at once."""
        self._reopen.set()
        self._wake.set()

    def close(self, timeout_s: float) -> int:
        """Write the queued items, and stop the thread. Return how many items were not written
        within `timeout_s` seconds.
        """
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return len(self._items)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.wait(_EVERY_S)
                self._wake.clear()
                self._drain()
                if self._reopen.is_set():
                    self._reopen.clear()
                    self._sink.reopen()
            self._drain()
            self._sink.close()
        except Exception:
            self._broken = True
            log.exception(
                "%s ended by a defect of ours; it writes nothing more",
                threading.current_thread().name,
            )

    def _drain(self) -> None:
        while self._items:
            batch = [self._items.popleft() for _ in range(min(len(self._items), _BATCH_ITEMS))]
            self._sink.write([item for item, _ in batch])
            self._taken_bytes += sum(size for _, size in batch)


class CountingSink(Sink[T_contra], Protocol[T_contra]):
    """A sink that counts the items written and lost."""

    @property
    def written(self) -> int: ...
    @property
    def lost(self) -> int: ...


class QueuedLog(Generic[T]):
    """A log written by a thread of its own, which counts the items written and lost. Lifetime:
    process.
    """

    def __init__(self, name: str, sink: CountingSink[T], items_max: int, bytes_max: int) -> None:
        self._name = name
        self._sink = sink
        self._background = Background(name, sink, items_max, bytes_max)
        self._no_room = 0

    @property
    def written(self) -> int:
        """The number of items written so far."""
        return self._sink.written

    @property
    def lost(self) -> int:
        """The number of items lost so far, because the queue or the file had no room."""
        return self._no_room + self._sink.lost

    def queue(self, item: T, size_bytes: int) -> None:
        """Queue an item that uses about `size_bytes` of memory. It never waits."""
        if not self._background.put(item, size_bytes):
            self._no_room += 1
            if worth_a_line(self._no_room):
                log.error("%s: %d lost: they come too fast", self._name, self._no_room)

    def reopen(self) -> None:
        """Make the log's thread open a new file, because the old one was moved. Returns at once."""
        self._background.reopen()

    def close(self) -> None:
        """Write the queued items. This takes up to five seconds, after which the rest is lost."""
        if left := self._background.close(_CLOSE_S):
            self._no_room += left
            log.error("%s: %d were not written before the end", self._name, left)


class LineFile(Protocol):
    """A file, or a folder of files, to which whole lines are appended. Each method except `close`
    may raise OSError.
    """

    @property
    def fresh(self) -> bool: ...  # a header is due
    @property
    def where(self) -> str: ...  # for people

    def make_room(self, size_bytes: int) -> None:
        """Begin a new file if `size_bytes` more bytes would exceed the limit."""

    def append(self, data: bytes) -> None:
        """Append whole lines to the file, or none of them."""

    def reopen(self) -> None:
        """Open the file again, because it may have been moved."""

    def close(self) -> None:
        """Close the file."""


class LineSink(Generic[T]):
    """Turns items into lines and appends them to a file, in the thread of a log.
    Lifetime: process.
    """

    def __init__(
        self,
        name: str,
        file: LineFile,
        lines: Callable[[Sequence[T]], bytes],
        heading: Callable[[], bytes] = bytes,
    ) -> None:
        """Write to `file`. `name` is the log's name for people, `lines` turns items into lines, and
        `heading` returns the first line of a file.
        """
        self.written = 0
        self.lost = 0
        self.outdated = False  # the last heading is no longer true
        self._name = name
        self._file = file
        self._lines = lines
        self._heading = heading
        self._trouble_lines = 0  # lost since the file could last be written

    def write(self, items: Sequence[T]) -> None:
        """Append a line for each item."""
        data, headed = self._lines(items), self._file.fresh or self.outdated
        if headed:
            data = self._heading() + data
        try:
            self._file.make_room(len(data))
            self._file.append(self._heading() + data if self._file.fresh and not headed else data)
        except OSError as error:
            self._give_up(len(items), error)
            return
        self.outdated = False
        self.written += len(items)
        if self._trouble_lines:
            log.warning("%s goes on after %d lost lines", self._name, self._trouble_lines)
            self._trouble_lines = 0

    def reopen(self) -> None:
        """Open the file that the path names now."""
        try:
            self._file.reopen()
        except OSError as error:
            why = error.strerror
            log.error("%s: cannot open %s anew: %s", self._name, self._file.where, why)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _give_up(self, count: int, error: OSError) -> None:
        if not self._trouble_lines:
            why = str(error) if error.filename2 else error.strerror or str(error)
            where = self._file.where
            log.error("%s: lines are lost: cannot write %s: %s", self._name, where, why)
        self._trouble_lines += count
        self.lost += count


@contextmanager
def opening(key: str, path: Path) -> Iterator[None]:
    """Add the configuration key and the file's path to the text of an OSError that is raised in the
    block.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"{key}: cannot write {path}: {why}") from error


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_MODE = 0o600  # shared prefixes and times of requests must not be readable for others


class LogFile:
    """A file to which one thread appends lines. Lifetime: process.

    If it would grow beyond `limit_bytes`, a regular file is renamed to `FILE.1`, replacing an older
    one, and a new file is begun. `fresh` is True when a heading must be written first.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Open the file. Raises OSError if that fails."""
        self.path = path
        self.fresh = True
        self._limit_bytes = limit_bytes
        self._open()

    @property
    def where(self) -> str:
        """The path of the file, for people."""
        return str(self.path)

    def append(self, data: bytes) -> None:
        """Append whole lines to the file, or none of them. Raises OSError if that fails."""
        start = os.fstat(self._fd).st_size if self._regular else 0
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            if self._regular:  # a torn line would spoil the next one too
                os.ftruncate(self._fd, start)
            raise
        self.fresh = False

    def make_room(self, size_bytes: int) -> None:
        """Begin a new file if `size_bytes` more bytes would exceed the limit. Raises OSError if
        that fails.
        """
        if not self._regular:
            return
        held_bytes = os.fstat(self._fd).st_size
        if held_bytes and held_bytes + size_bytes > self._limit_bytes:
            with suppress(FileNotFoundError):  # moved away, and `reopen` was not called yet
                os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            self._open_anew()

    def reopen(self) -> None:
        """Open the path again if it now names another file or none. Raises OSError if
        that fails.
        """
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._fd)):
            self._open_anew()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _open(self) -> None:
        try:
            self._fd = os.open(self.path, _FLAGS | os.O_NONBLOCK, _MODE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # to wait for one would keep the router from starting
                raise OSError(errno.ENXIO, "a pipe that nobody reads", str(self.path)) from error
            raise
        os.set_blocking(self._fd, True)  # a slow reader is waited for, in the thread that writes
        self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self.fresh = True

    def _open_anew(self) -> None:
        old = self._fd
        self._open()  # where that fails the old one stays in use
        os.close(old)


class Stdout(LogFile):
    """Standard output, used like a log file. Lifetime: process."""

    def __init__(self) -> None:
        self.path = Path("-")
        self._fd, self._regular, self.fresh = 1, False, False

    def reopen(self) -> None:
        """Do nothing: standard output cannot be moved."""

    def close(self) -> None:
        """Do nothing: others write to standard output, too."""


SALT_NAME = "salt"
_NAME = re.compile(r"requests-(\d{8}T\d{6}\.\d{6})Z\.jsonl(\.gz)?")
_TIME = "%Y%m%dT%H%M%S.%f"
_PACKED = 6  # zlib's level; chains hardly shrink at any
_STEP = timedelta(microseconds=1)


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of the folder `record`, in which the request log is kept in parts."""

    part_bytes: Annotated[
        int,
        Meta(
            ge=4_096,
            le=1 << 40,
            description="size at which the router ends a part of the request log, bytes",
        ),
    ] = 64 << 20
    part_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=86_400.0,
            description="age at which the router ends a part of the request log, seconds",
        ),
    ] = 3_600.0
    parts: Annotated[
        int,
        Meta(
            ge=2,
            le=100_000,
            description="maximum number of parts; the router deletes the oldest part first",
        ),
    ] = 1_000
    total_bytes: Annotated[
        int,
        Meta(
            ge=8_192,
            le=1 << 50,
            description="largest size of all parts, bytes; the router deletes the oldest part "
            "first",
        ),
    ] = 8 << 30


class Parts:
    """A folder of log files, each of which is a part of the log. One thread uses it; several
    routers may share a folder. Lifetime: process.
    """

    def __init__(self, folder: Path, limits: Recording, now_s: Callable[[], float]) -> None:
        """Create the folder if it is missing; its parent must exist. `now_s` returns unix time.

        Raises OSError that says which file cannot be written and why.
        """
        self._folder = folder
        self._limits = limits
        self._now_s = now_s
        with opening("record", folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            self.salt: Salt = salt_in(folder / SALT_NAME)
        self._file: LogFile | None = None
        self._span = 0  # of time, which the open part's lines are of
        self._held_bytes = 0

    @property
    def fresh(self) -> bool:
        """True if the next line is the first of its part."""
        return self._file is None or self._file.fresh

    @property
    def where(self) -> str:
        """The path of the folder, for people."""
        return str(self._folder)

    def make_room(self, size_bytes: int) -> None:
        """End the present part if `size_bytes` more bytes would exceed its limit, or if its time
        span is over.
        """
        span = int(self._now_s() // self._limits.part_s)
        full = self._held_bytes + size_bytes > self._limits.part_bytes
        if self._file is not None and self._held_bytes and (full or span != self._span):
            self._end_part()
        self._span = span

    def append(self, data: bytes) -> None:
        """Append whole lines to the present part, or none of them. Raises OSError if that fails."""
        if self._file is None:
            self._file = self._begun()
        self._file.append(data)
        self._held_bytes += len(data)

    def reopen(self) -> None:
        """Begin a new part."""
        if self._held_bytes:
            self._end_part()

    def close(self) -> None:
        """Close the last part. It is not compressed, because a router that ends has no time for
        that.
        """
        if self._file is not None:
            self._file.close()
            if not self._held_bytes:
                self._file.path.unlink(missing_ok=True)
            self._file = None

    def _begun(self) -> LogFile:
        """Begin a new part, after removing old parts if necessary. Raises OSError if that fails."""
        limits = self._limits
        self._forget(limits.parts - 1, limits.total_bytes - limits.part_bytes)
        at = datetime.fromtimestamp(self._now_s(), UTC)
        if parts := parts_in(self._folder):
            at = max(at, _time_of(parts[-1]) + _STEP)  # after those of a clock that was ahead
        while True:
            path = self._folder / f"requests-{at.strftime(_TIME)}Z.jsonl"
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                break
            except FileExistsError:  # another router's
                at += _STEP
        return LogFile(path, limits.total_bytes)

    def _end_part(self) -> None:
        assert self._file is not None, "a part that holds something is open"
        path = self._file.path
        self._file.close()
        self._file, self._held_bytes = None, 0
        packed = path.with_name(path.name + ".gz")
        unfinished = path.with_name(path.name + ".packing")
        try:
            _pack(path, unfinished)
            os.replace(unfinished, packed)
            path.unlink()
        except FileNotFoundError:
            log.warning("recording: %s was taken away", path)
        except OSError as error:
            log.error("recording: %s stays unpacked: %s", path, error.strerror)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _forget(self, parts: int, total_bytes: int) -> None:
        """Remove the oldest parts until at most `parts` parts and `total_bytes` bytes are left."""
        held = [
            (path, size) for path in parts_in(self._folder) if (size := _size(path)) is not None
        ]
        count, bytes_held = len(held), sum(size for _, size in held)
        for path, size in held:
            if count <= parts and bytes_held <= total_bytes:
                return
            path.unlink(missing_ok=True)
            log.info("recording: removed the oldest part, %s, %d bytes", path.name, size)
            count, bytes_held = count - 1, bytes_held - size


def parts_in(folder: Path) -> list[Path]:
    """Return the paths of a recording's parts, the oldest first. Raises OSError if the folder
    cannot be read.
    """
    found = {path.name: path for path in folder.iterdir() if _NAME.fullmatch(path.name)}
    return [found[name] for name in sorted(found) if f"{name}.gz" not in found]


def _time_of(path: Path) -> datetime:
    named = _NAME.fullmatch(path.name)
    assert named is not None, f"{path} is a part"
    try:
        return datetime.strptime(named[1], _TIME).replace(tzinfo=UTC)
    except ValueError:  # the name was not made by the router
        return datetime.fromtimestamp(0, UTC)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another router removed it
        return None


def _pack(path: Path, packed: Path) -> None:
    with (
        path.open("rb") as plain,
        open(os.open(packed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as raw,
        gzip.GzipFile("", "wb", _PACKED, raw, mtime=0) as file,
    ):
        shutil.copyfileobj(plain, file, 1 << 18)

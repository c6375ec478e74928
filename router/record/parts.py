"""A folder of parts that lines are appended to: begun anew by size and by the hour, and bounded.

A part is `requests-TIME.jsonl`, its time in its name, so that names stand in order of time. One
that is full is packed (`.jsonl.gz`); one that a router's end left is whole and stays as it is.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from router.record.log_file import LogFile
from router.record.salt import Salt, salt_in

log = logging.getLogger(__name__)

SALT_NAME = "salt"
_NAME = re.compile(r"requests-(\d{8}T\d{6}\.\d{6})Z\.jsonl(\.gz)?")
_TIME = "%Y%m%dT%H%M%S.%f"
_PACKED = 6  # zlib's level; chains hardly shrink at any
_STEP = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class PartLimits:
    """How large a folder of parts may become. Lifetime: process."""

    part_bytes: int
    part_s: float  # a part holds lines of one such span of unix time
    parts: int  # files, the open one included
    total_bytes: int  # of all files, the open one at its largest included


class Parts:
    """Lifetime: process. Used by one thread; several routers may have one folder."""

    def __init__(self, folder: Path, limits: PartLimits, now_s: Callable[[], float]) -> None:
        """Makes the folder where only that is missing. `now_s`: unix time.

        Raises OSError that says which file cannot be written and why.
        """
        self._folder = folder
        self._limits = limits
        self._now_s = now_s
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.salt: Salt = salt_in(folder / SALT_NAME)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(f"record: cannot write {folder}: {why}") from error
        self._file: LogFile | None = None
        self._span = 0  # of time, which the open part's lines are of
        self._held_bytes = 0

    @property
    def fresh(self) -> bool:
        """The next line is the first of its part."""
        return self._file is None or self._file.fresh

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._folder)

    def make_room(self, size_bytes: int) -> None:
        """End the part where `size_bytes` more are too many, or another hour has come."""
        span = int(self._now_s() // self._limits.part_s)
        full = self._held_bytes + size_bytes > self._limits.part_bytes
        if self._file is not None and self._held_bytes and (full or span != self._span):
            self._end_part()
        self._span = span

    def append(self, data: bytes) -> None:
        """Write whole lines, or none of them. Raises OSError."""
        if self._file is None:
            self._file = self._begun()
        self._file.append(data)
        self._held_bytes += len(data)

    def reopen(self) -> None:
        """Begin another part."""
        if self._held_bytes:
            self._end_part()

    def close(self) -> None:
        """The end. The last part stays as it is: a router that ends has no time to pack it."""
        if self._file is not None:
            self._file.close()
            if not self._held_bytes:
                self._file.path.unlink(missing_ok=True)
            self._file = None

    def _begun(self) -> LogFile:
        """A new part, once there is room for it. Raises OSError."""
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
        """Remove the oldest parts beyond so many, and so many bytes."""
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
    """The parts of a recording, the oldest first. Raises OSError."""
    found = {path.name: path for path in folder.iterdir() if _NAME.fullmatch(path.name)}
    return [found[name] for name in sorted(found) if f"{name}.gz" not in found]


def _time_of(path: Path) -> datetime:
    named = _NAME.fullmatch(path.name)
    assert named is not None, f"{path} is a part"
    try:
        return datetime.strptime(named[1], _TIME).replace(tzinfo=UTC)
    except ValueError:  # somebody made the name up
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

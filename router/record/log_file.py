"""A file that lines are appended to: bounded by turning it over, moved away by whoever likes."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_MODE = 0o600  # what requests share and when is nobody else's business


class LogFile:
    """Lifetime: process. Used by one thread.

    Beyond `limit_bytes` a regular file is renamed to `FILE.1`, in place of an older one, and
    begun anew. `fresh` is set whenever a header is due.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Opens the file. Raises OSError."""
        self.path = path
        self.fresh = True
        self._limit_bytes = limit_bytes
        self._open()

    @property
    def where(self) -> str:
        """The file, for people."""
        return str(self.path)

    def append(self, data: bytes) -> None:
        """Write whole lines, or none of them. Raises OSError."""
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
        """Turn the file over where `size_bytes` more would go beyond the limit. Raises OSError."""
        if not self._regular:
            return
        held_bytes = os.fstat(self._fd).st_size
        if held_bytes and held_bytes + size_bytes > self._limit_bytes:
            with suppress(FileNotFoundError):  # moved away, and nobody has told us yet
                os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            self._open_anew()

    def reopen(self) -> None:
        """Where the path names another file by now, or none, go on there. Raises OSError."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._fd)):
            self._open_anew()

    def close(self) -> None:
        """The end."""
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

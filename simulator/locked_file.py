"""A file of lines that one run at a time may write: each is on the disk before the next begins."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self, cast

from simulator.sweep.errors import SweepError


class LockedFile:
    """Lifetime: the `with` block, during which nobody else may write it."""

    def __init__(self, path: Path, writer: str, read: Callable[[], None]) -> None:
        """Opens and locks `path`, then has it `read`; `writer` names who else may hold it.

        Raises `SweepError` for a file that cannot be written or that another run writes.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = cast(BinaryIO, path.open("a+b", buffering=0))
        except OSError as error:
            raise SweepError([f"{path}: cannot be written: {error.strerror}"]) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            read()
        except BlockingIOError as error:
            self._file.close()
            told = f"{path}: another {writer} writes to it; wait for its end or name another file"
            raise SweepError([told]) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())

"""The file of results: one line for each run, written as it ends and read when a sweep resumes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self, cast

import msgspec

from router.config.paths import unreadable
from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow
from simulator.runs.task import RunOutcome, SweepError, Task

HEADER = b'{"format":"warmroute-sweep","version":1}\n'


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the file of results: a run with its row of figures, or with the error that left
    it without one.
    """

    key: str
    setup: Setup
    row: ReplayRow | None = None
    error: str | None = None
    attempts: int = 1


def read_records(path: Path) -> Iterator[Record]:
    """Yield every run in a file of results, in the order in which they ended.

    An incomplete last line is left out; other processes may be writing to the file. Raises
    `SweepError` for a file that cannot be read or is no file of results.
    """
    decoder = msgspec.json.Decoder(Record)
    try:
        with path.open("rb") as lines:
            if lines.readline() != HEADER:
                raise SweepError([f"{path}: not a file of sweep results (`sweep` writes them)"])
            for number, line in enumerate(lines, 2):
                if not line.endswith(b"\n"):
                    return
                yield _decoded(decoder, path, line, number)
    except OSError as error:
        raise SweepError([unreadable(path, error)]) from error


def _decoded(decoder: msgspec.json.Decoder[Record], path: Path, line: bytes, number: int) -> Record:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SweepError(
            [
                f"{path}:{number}: not a result ({error}); remove that line to run it again, or "
                "name another file"
            ]
        ) from error


class Store:
    """The results of runs by key, kept in a file to which no other process may write meanwhile.

    A line is on the disk before `add` returns. A last line without its end was torn by a crash: it
    is dropped, and its run is done again. Failed runs are done again as well. Lifetime: the `with`
    block.
    """

    def __init__(self, path: Path) -> None:
        """Open, lock and read `path`.

        Raises `SweepError` for a file that cannot be written or that another run writes.
        """
        self.path = path
        self.rows: dict[str, ReplayRow] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = cast(BinaryIO, path.open("a+b", buffering=0))
        except OSError as error:
            raise SweepError([f"{path}: cannot be written: {error.strerror}"]) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError as error:
            self._file.close()
            told = f"{path}: another sweep writes to it; wait for its end or name another file"
            raise SweepError([told]) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def done(self, task: Task) -> RunOutcome | None:
        """Return the outcome of a task that has a row, else None."""
        row = self.rows.get(task.key)
        return None if row is None else RunOutcome(task, row)

    def add(self, outcome: RunOutcome) -> None:
        """Write the outcome as one line, which is on the disk when this returns."""
        task = outcome.task
        record = Record(task.key, task.setup, outcome.row, outcome.error, outcome.attempts)
        self._write(msgspec.json.encode(record) + b"\n")
        if outcome.row is not None:
            self.rows[task.key] = outcome.row

    def _read(self) -> None:
        self._file.seek(0)
        head = self._file.read(len(HEADER))
        if not head.endswith(b"\n") and HEADER.startswith(head):  # new, or torn at its first line
            self._file.truncate(0)
            self._write(HEADER)
            return
        if head != HEADER:
            raise SweepError(
                [f"{self.path}: not a file of sweep results; name another, or remove it"]
            )
        decoder = msgspec.json.Decoder(Record)
        end = len(HEADER)
        with self.path.open("rb") as lines:
            lines.seek(end)
            for number, line in enumerate(lines, 2):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                self._take(decoder, line, number)
        self._file.truncate(end)

    def _take(self, decoder: msgspec.json.Decoder[Record], line: bytes, number: int) -> None:
        record = _decoded(decoder, self.path, line, number)
        if record.row is not None:
            self.rows[record.key] = record.row

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())

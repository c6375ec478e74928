"""The journal of a learning run: a line after each generation, from which it goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from simulator.learn.objective import Figures
from simulator.learn.search import Theta
from simulator.locked_file import LockedFile
from simulator.sweep.errors import SweepError

FORMAT, VERSION = "warmroute-learn", 1


class Head(msgspec.Struct, frozen=True):
    """The first line: what the run is, and what the start gave, by lesson and seed."""

    format: str
    version: int
    run: str  # stands for lessons, files, settings and program: another one cannot go on from here
    start: list[list[Figures]]


class Generation(msgspec.Struct, frozen=True):
    """A further line: coefficients and their scores."""

    thetas: list[Theta]
    scores: list[float]


class Journal(LockedFile):
    """Lines in a file. Lifetime: the `with` block, during which nobody else may write it.

    A line is on the disk before `add` returns; a last line without its end was torn by a crash,
    and is dropped. Raises `SweepError` for a file that is of another run, or no journal.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._run = run
        self.start: list[list[Figures]] | None = None
        self.generations: list[Generation] = []
        super().__init__(path, "run", self._read)

    def begin(self, start: list[list[Figures]]) -> None:
        """Notes what the start gave."""
        self._write(_line(Head(FORMAT, VERSION, self._run, start)))
        self.start = start

    def add(self, generation: Generation) -> None:
        """Notes a generation."""
        self._write(_line(generation))
        self.generations.append(generation)

    def _read(self) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        for number, line in enumerate(lines, 1):
            try:
                if number == 1:
                    self._take_head(msgspec.json.decode(line, type=Head))
                else:
                    self.generations.append(msgspec.json.decode(line, type=Generation))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                where = f"{self.path}:{number}: no line of a learning run"
                raise SweepError([f"{where} ({error}); name another file"]) from error

    def _take_head(self, head: Head) -> None:
        if (head.format, head.version, head.run) != (FORMAT, VERSION, self._run):
            raise SweepError(
                [
                    f"{self.path}: is of other lessons, traces or settings, or of another version; "
                    "name another file (--state), or remove it to begin anew"
                ]
            )
        self.start = head.start


def _line(of: msgspec.Struct) -> bytes:
    return msgspec.json.encode(of) + b"\n"

"""One run of many: what it is asked, the key by which it is known again, what became of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, Self

import msgspec

from engine.profile import SUFFIX as PROFILE_SUFFIX
from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow
from simulator.sweep.errors import SweepError
from simulator.sweep.policy_files import policy_files

# A row for a set-up. It is sent to other processes by its name, so it is a function of a module.
Evaluate = Callable[[Setup], ReplayRow]
KEY_DIGITS = 20
GENERATOR = "gen:"


class Task(msgspec.Struct, frozen=True):
    """A run to do."""

    key: str
    setup: Setup


class Outcome(msgspec.Struct, frozen=True):
    """What became of a run: a row or an error, never both."""

    task: Task
    row: ReplayRow | None
    error: str | None = None
    attempts: int = 1


class Runner(Protocol):
    """Runs tasks elsewhere; leaving its block ends what still runs."""

    jobs: int  # runs at a time

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """The outcomes as they come, in any order, one for each task."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Keys:
    """Makes tasks of set-ups. Lifetime: one sweep.

    A key stands for the set-up, the bytes of the files it names, those of its policy's source and
    the version of this program: what was changed under its old name makes another run.
    """

    def __init__(self) -> None:
        self._version = version("warmroute")
        self._digests: dict[str, str] = {}
        self._policies: dict[str, list[Path]] = {}

    def task(self, setup: Setup) -> Task:
        """The task of a set-up. Raises `SweepError` for a file that cannot be read."""
        said = hashlib.sha256(self._version.encode())
        if setup.policy not in self._policies:
            self._policies[setup.policy] = policy_files(setup.policy)
        for path in (*_files(setup), *map(str, self._policies[setup.policy])):
            said.update(self._digest(path).encode())
        said.update(msgspec.json.encode(setup, order="sorted"))
        return Task(said.hexdigest()[:KEY_DIGITS], setup)

    def _digest(self, path: str) -> str:
        if path not in self._digests:
            try:
                with Path(path).open("rb") as file:
                    self._digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise SweepError([f"{path}: cannot be read: {error.strerror}"]) from error
        return self._digests[path]


def _files(setup: Setup) -> list[str]:
    """The files that a set-up names: trace, faults, profiles."""
    source = setup.workload.source
    named = [] if source.startswith(GENERATOR) else [source]
    named += [] if setup.faults is None else [setup.faults]
    return [*named, *(g.profile for g in setup.groups if g.profile.endswith(PROFILE_SUFFIX))]

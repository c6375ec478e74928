"""A task, which is one run of many with the key that identifies it; and the error of an invalid
sweep.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from engine.profiles import SUFFIX as PROFILE_SUFFIX
from policies.load import POLICY, WRAPPER, PolicyError
from policies.near import did_you_mean
from router.config.paths import unreadable
from simulator.replay.setup import Setup
from simulator.traces.files import located


class SweepError(ValueError):
    """Raised for a sweep or plan that cannot be run; `problems` has a line for each thing that is
    wrong.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def unknown(where: str, name: object, valid: Iterable[str]) -> str:
    """Return the error line for a name that is not among the `valid` ones, with the likeliest
    match.
    """
    names = list(valid)
    hint = did_you_mean(str(name), names)
    return f"{where}: unknown {name!r}{hint}; valid: {', '.join(names)}"


# Modules of the policies' interface, which every policy imports.
COMMON = frozenset(f"policies.{name}" for name in ("arrays", "contract", "facts", "record"))


def policy_files(spec: str) -> list[Path]:
    """Return the source files of the policy, its wrappers, and what they import of their own
    package.

    The list is sorted. It is empty for a policy that cannot be loaded: its run will report that.
    """
    found: dict[str, Path] = {}
    for number, part in enumerate(spec.split("|")):
        name = part.partition("?")[0]
        try:
            behind = (WRAPPER if number else POLICY).find(name)
        except PolicyError:
            return []
        file = inspect.getsourcefile(behind)
        if file is not None:
            _follow(behind.__module__, Path(file), found)
    return sorted(found.values())


def _follow(module: str, file: Path, found: dict[str, Path]) -> None:
    if module in found or module in COMMON:
        return
    found[module] = file
    for name in _imported(file, module.partition(".")[0]):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            _follow(name, Path(spec.origin), found)


def _imported(file: Path, package: str) -> list[str]:
    """Return the modules of `package` that a file imports by their full names."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return [name for name in names if name.startswith(f"{package}.")]


# What a run gives for a set-up: a row, to whoever keeps results. It is sent to other processes by
# its name, so it is a function of a module.
Evaluate = Callable[[Setup], Any]
KEY_DIGITS = 20
GENERATOR = "gen:"


class Task(msgspec.Struct, frozen=True):
    """One run to do, with the key that identifies it."""

    key: str
    setup: Setup


class RunOutcome(msgspec.Struct, frozen=True):
    """The outcome of a run: a row of figures or an error, never both."""

    task: Task
    row: Any  # the result of `Evaluate`; None: there is none
    error: str | None = None
    attempts: int = 1


class Runner(Protocol):
    """Runs tasks in other processes; at the end of its `with` block, runs in progress are ended."""

    jobs: int  # runs at a time

    def run(self, tasks: Sequence[Task]) -> Iterator[RunOutcome]:
        """Yield the outcome of each run when it ends, in any order, one for each task."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Keys:
    """Makes tasks, with their keys, for set-ups.

    A key stands for the set-up, the contents of the files that it names, the source of its policy,
    and the version of this program: if any of them changes, it is another run. Lifetime: one sweep.
    """

    def __init__(self) -> None:
        self._version = version("warmroute")
        self._digests: dict[str, str] = {}
        self._policies: dict[str, list[Path]] = {}

    def task(self, setup: Setup) -> Task:
        """Return the task of a set-up. Raises `SweepError` for a file that cannot be read."""
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
                with located(Path(path)).open("rb") as file:
                    self._digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise SweepError([unreadable(Path(path), error)]) from error
        return self._digests[path]


def _files(setup: Setup) -> list[str]:
    """Return the files that a set-up names: trace, faults, profiles."""
    source = setup.workload.source
    named = [] if source.startswith(GENERATOR) else [source]
    named += [] if setup.faults is None else [setup.faults]
    return [*named, *(g.profile for g in setup.groups if g.profile.endswith(PROFILE_SUFFIX))]

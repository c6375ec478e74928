"""Sources that the router polls: a file, and a DNS name with several addresses."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from router.discovery.source import MAX_SEEN, DnsSpec, bounded
from router.engines.spec import WorkerSpecError
from router.engines.worker_spec import worker_spec_of
from router.fleet.sources import Report, ReportedWorker

LOOK_S = 0.25
MAX_BYTES = 1 << 20
ReadFile = Callable[[Path], tuple[ReportedWorker, ...]]
_Mark = tuple[int, int, int] | str  # what tells one content from another; text: why there is none


class FileSource:
    """Reads workers from a file. A `.json`, `.yaml` or `.yml` file holds a list, or a mapping whose
    `workers` is a list; any other file has one worker a line, with `#` before comments. If the file
    cannot be read, its previous workers stay. A changed file is read only after it stayed the same
    between two checks, because a half-written file may look complete. Lifetime: as long as the
    configuration names the source.
    """

    def __init__(self, path: Path, look_s: float = LOOK_S, read: ReadFile | None = None) -> None:
        """Make a source for the file `path`, which is checked every `look_s` seconds. `read`
        returns the workers in the file, and raises ValueError if it cannot.
        """
        self._path = path
        self._look_s = look_s
        self._read = read or _workers_in
        self._good: tuple[ReportedWorker, ...] | None = None

    async def reports(self) -> AsyncIterator[Report]:
        """Yield a report at once, and after each change of the file."""
        standing = read = await asyncio.to_thread(_mark, self._path)
        yield await self._report()
        while True:
            await asyncio.sleep(self._look_s)
            before, standing = standing, await asyncio.to_thread(_mark, self._path)
            if standing == before and standing != read:
                read = standing
                yield await self._report()

    async def _report(self) -> Report:
        try:
            self._good = await asyncio.to_thread(self._read, self._path)
        except ValueError as error:
            stays = "; what it said before stays" if self._good is not None else ""
            return Report(self._good, f"{error}{stays}")
        return Report(self._good)


def _mark(path: Path) -> _Mark:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.strerror or "cannot be read"
    return found.st_mtime_ns, found.st_ino, found.st_size


def data_in(path: Path) -> bytes:
    """Return the contents of a file of at most `MAX_BYTES`. Raises ValueError if the file is larger
    or cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    return data


def _workers_in(path: Path) -> tuple[ReportedWorker, ...]:
    """Return the workers in a file. Raises ValueError if the file or a worker in it is invalid."""
    data = data_in(path)
    if not data.strip():
        raise ValueError("it is empty; write [] (or a comment) to name no worker")
    items = _items(path.suffix, data)
    if len(items) > MAX_SEEN:
        raise ValueError(f"{len(items)} workers; allowed: {MAX_SEEN}")
    found: dict[tuple[str, int | None], ReportedWorker] = {}
    for place, item in items:
        try:
            spec = worker_spec_of(item)
        except WorkerSpecError as error:
            raise ValueError(f"{place}: {error}") from error
        if found.setdefault((spec.url, spec.rank), one := ReportedWorker(spec)) is not one:
            raise ValueError(f"{place}: {spec.name} is given twice")
    return tuple(found.values())


_STRUCTURED = (".json", ".yaml", ".yml")


def _items(suffix: str, data: bytes) -> list[tuple[str, Any]]:
    """Return each worker in a file with its place in the file, which error messages name. Raises
    ValueError if the file is malformed.
    """
    try:
        if suffix == ".json":
            whole = msgspec.json.decode(data)
        elif suffix in (".yaml", ".yml"):
            whole = yaml.safe_load(data)
        else:
            lines = [line.partition("#")[0].strip() for line in data.decode().splitlines()]
            return [(f"line {n}", line) for n, line in enumerate(lines, 1) if line]
    except (msgspec.DecodeError, yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        kind = suffix[1:] if suffix in _STRUCTURED else "text"
        raise ValueError(f"not {kind}: {' '.join(str(error).split())}") from error
    if isinstance(whole, dict) and "workers" in whole:
        whole = whole["workers"]
    if not isinstance(whole, list):
        raise ValueError("it must be a list of workers, or a mapping whose `workers` is one")
    return [(f"worker {n}", item) for n, item in enumerate(whole, 1)]


ANSWER_S = 5.0  # timeout of a DNS look-up, seconds


class DnsSource:
    """Reads workers from the addresses of a DNS name. Only one query runs at a time, however long
    the resolver takes. Lifetime: as long as the configuration names the source.
    """

    def __init__(self, spec: DnsSpec, answer_s: float = ANSWER_S) -> None:
        self._spec = spec
        self._answer_s = answer_s
        self._resolving: asyncio.Task[Report] | None = None

    async def reports(self) -> AsyncIterator[Report]:
        """Yield a report for each answer of the resolver."""
        while True:
            yield await self._resolved()
            await asyncio.sleep(self._spec.every_s)

    async def _resolved(self) -> Report:
        if self._resolving is None:
            self._resolving = asyncio.create_task(self._resolve())
        # A look-up runs in a thread, which cannot be stopped: the next look waits for it.
        done, _ = await asyncio.wait({self._resolving}, timeout=self._answer_s)
        if not done:
            return Report(None, f"{self._spec.name}: no answer from DNS in {self._answer_s:g} s")
        answer, self._resolving = self._resolving, None
        return answer.result()

    async def _resolve(self) -> Report:
        spec = self._spec
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(spec.name, spec.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return Report(None, f"{spec.name} does not resolve: {error}")
        seen: dict[str, ReportedWorker] = {}
        refused: list[str] = []
        for address in sorted({str(entry[4][0]) for entry in found}):
            try:
                worker = spec.template.at(address, spec.port, spec.name)
            except WorkerSpecError as error:
                refused.append(f"{address}: {error}")
            else:
                seen[worker.url] = ReportedWorker(worker)
        return bounded(list(seen.values()), refused)

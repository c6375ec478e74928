"""Workers in a file: taken whole or not at all, and again whenever it changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from router.config.worker_spec import WorkerSpecError, worker_spec_of
from router.discovery.source import MAX_SEEN, Report, ReportedWorker

LOOK_S = 0.25
MAX_BYTES = 1 << 20
_Mark = tuple[int, int, int] | str  # what tells one content from another; text: why there is none


class FileSource:
    """`.json`, `.yaml` and `.yml` hold a list, or a mapping whose `workers` is one; any other file
    a worker a line, with `#` before comments. Lifetime: as long as it is named.

    A file that cannot be used changes nothing: what it said before goes on. A change is read once
    the file has stood still from one look to the next, since a half-written one may look whole.
    """

    def __init__(self, path: Path, look_s: float = LOOK_S) -> None:
        self._path = path
        self._look_s = look_s
        self._good: tuple[ReportedWorker, ...] | None = None

    async def reports(self) -> AsyncIterator[Report]:
        """At once, and after each change."""
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
            self._good = await asyncio.to_thread(_workers_in, self._path)
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


def _workers_in(path: Path) -> tuple[ReportedWorker, ...]:
    """Raises ValueError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
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
    """Each worker with its place, for people. Raises ValueError."""
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

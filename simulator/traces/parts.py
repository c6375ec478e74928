"""A trace that lies in several files, as `warmroute serve --record DIR` writes it, read as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Protocol

from simulator.traces.errors import ErrorLog, TraceError
from simulator.traces.files import TraceFile

PATTERNS = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst")  # what of a folder counts as a part
_PACKINGS = (".gz", ".zst")


class Lines(Protocol):
    """What a format is read from."""

    @property
    def path(self) -> Path: ...
    def lines(self, errors: ErrorLog) -> Iterator[tuple[int, bytes]]:
        """As `TraceFile.lines`."""
        ...


class TraceParts:
    """Files one after the other; lines are counted through. Lifetime: stream.

    Each is opened when it is reached: a part may be packed or begun while others are read.
    """

    def __init__(self, path: Path, parts: Sequence[Path]) -> None:
        """`path`: as it was asked for. Raises `TraceError` for a part that cannot be opened."""
        self.path = path
        self._parts = parts
        self._sizes = [_size(part) for part in parts]
        self._done_bytes = 0
        self._open: TraceFile | None = None

    def close(self) -> None:
        """Closes what is open; harmless when nothing is."""
        if self._open is not None:
            self._open.close()

    def fraction_read(self) -> float:
        """Share of all parts' bytes, as packed, that have been read."""
        total = sum(self._sizes)
        if not total:
            return 1.0
        at = 0 if self._open is None else self._sizes[self._parts.index(self._open.path)]
        share = 0.0 if self._open is None else self._open.fraction_read()
        return min(1.0, (self._done_bytes + share * at) / total)

    def lines(self, errors: ErrorLog) -> Iterator[tuple[int, bytes]]:
        """As `TraceFile.lines`, of all parts."""
        before = number = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            self._open = TraceFile(part)
            for in_part, line in self._open.lines(errors):
                number = before + in_part
                yield number, line
            before = number
            self._open = None
            self._done_bytes += size


def opened(path: Path) -> TraceFile | TraceParts:
    """The file at `path`, or the parts in that folder or of that pattern, by name.

    Raises `TraceError` where there is none, or it cannot be opened.
    """
    parts = parts_of(path)
    return TraceFile(path) if parts is None else TraceParts(path, parts)


def parts_of(path: Path) -> list[Path] | None:
    """The parts in a folder or of a pattern (`*`, `?`, `[...]`), by name; None: `path` is a file.

    Raises `TraceError` where there is none.
    """
    if path.is_dir():
        found = {part for pattern in PATTERNS for part in path.glob(pattern)}
        where = f"{path}: holds no part of a trace ({', '.join(PATTERNS)})"
    elif has_magic(str(path)) and not path.exists():
        found = {Path(name) for name in glob(str(path)) if not Path(name).is_dir()}
        where = f"{path}: no file has such a name"
    else:
        return None
    packed = {part.with_suffix("") for part in found if part.suffix in _PACKINGS}
    kept = sorted(part for part in found if part not in packed and _size(part))
    if not kept:
        raise TraceError(where)
    return kept


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error

"""Reads evidence that only clients have from files that the operator gives: error texts, and the
shapes of requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

MAX_LINES, MAX_LINE = 1_000_000, 1 << 20  # of a file, in characters of a line
MAX_KINDS = 10_000  # most distinct requests that are counted separately
# Text of an error -> the key under which causes look for it.
_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "exceeds maximum queue size": "queue_full",
        "request timeout expired": "queue_timeout",
        "expected batch dimension to be 1": "batch_dimension",
        "failed to increase the shared memory pool": "shared_memory",
        "out of memory": "out_of_memory",
        "decoupled": "decoupled",
    }
)


class FileError(Exception):
    """Raised when a file cannot be read; the text says which file and why."""


def counted(lines: Iterable[str]) -> dict[str, int]:
    """Return for each known error text the number of lines that contain it."""
    found: dict[str, int] = {}
    for line in lines:
        low = line.lower()
        for text, key in _TEXTS.items():
            if text in low:
                found[key] = found.get(key, 0) + 1
                break
    return found


def error_texts(path: Path) -> dict[str, int]:
    """Return how often each known error occurs in a log. Raises FileError if the log cannot be
    read.
    """
    return counted(_lines(path))


def request_kinds(path: Path) -> tuple[int, int]:
    """Return the number of different shapes among requests with the same inputs, and the number of
    different sets of inputs. The file has one request a line, as `infer` takes it. Raises FileError
    if the file cannot be read or is malformed.
    """
    shapes: dict[frozenset[str], set[str]] = {}
    kinds = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            inputs = json.loads(line)["inputs"]
            named = {str(one["name"]): list(one["shape"]) for one in inputs}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileError(f"{path} line {number}: no request with inputs ({error!r})") from error
        seen = shapes.setdefault(frozenset(named), set())
        before = len(seen)
        seen.add(json.dumps(named, sort_keys=True))
        kinds += len(seen) - before
        if kinds > MAX_KINDS:
            break
    if not shapes:
        raise FileError(f"{path}: no request in it")
    return max(map(len, shapes.values())), len(shapes)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file that are not empty: at most `MAX_LINES`, each cut at `MAX_LINE`
    characters.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for _ in range(MAX_LINES):
                line = file.readline(MAX_LINE)
                if not line:
                    return
                if line.strip():
                    yield line
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error

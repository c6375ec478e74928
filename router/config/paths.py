"""Finds the file or folder that is most similar to a path that does not exist."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from policies.near import nearest

_MAX_NAMES = 2_000  # most names of a folder that are read


def unreadable(path: Path, error: OSError) -> str:
    """Return `PATH: cannot be read: REASON`, with the likely path if the file does not exist."""
    near = near_path(path) if isinstance(error, FileNotFoundError) else ""
    return f"{path}: cannot be read: {error.strerror or error}{near}"


def near_path(path: Path) -> str:
    """Return ` (did you mean PATH?)` with the most similar path that exists, or "" if there is
    none.

    Only one part of the path is corrected: the first that does not exist.
    """
    missing = path
    while missing.parent != missing and not os.path.isdir(missing.parent):
        missing = missing.parent
    if not missing.name or os.path.exists(missing):
        return ""
    try:
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in islice(entries, _MAX_NAMES)]
    except OSError:
        return ""
    near = nearest(missing.name, names)
    if near is None:
        return ""
    found = missing.with_name(near)
    whole = found / path.relative_to(missing)
    return f" (did you mean {whole if os.path.exists(whole) else found}?)"

"""Checks that run before a command starts anything, and the writer of its JSON file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from engine.profiles import profile
from policies.load import PolicyError, load


class UsageError(ValueError):
    """Raised if the command line asks for something impossible; the message says what
    would work.
    """


def base_url(text: str) -> str:
    """Return a base address without the `/v1` that some clients need; this program adds it itself.
    Raises `UsageError` for a text that is no base URL.
    """
    url = text.rstrip("/").removesuffix("/v1").rstrip("/")
    if not re.match(r"https?://[^/]+", url):
        raise UsageError(f"URL {text!r}: expected http://HOST:PORT")
    return url


def check_profile(name: str) -> None:
    """Raise `UsageError` for a profile that does not exist."""
    try:
        profile(name)
    except ValueError as error:
        raise UsageError(f"--profile: {error}") from error


def check_policy(spec: str) -> None:
    """Raise `UsageError` for a policy that cannot be loaded."""
    try:
        load(spec)
    except PolicyError as error:
        raise UsageError(f"--policy: {error}") from error


def check_file(option: str, path: Path) -> None:
    """Raise `UsageError` for a file that could not be written at the end of the command."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: may not be written; name a file that may")


def check_files(read: Iterable[object], **written: Path | None) -> None:
    """Raise `UsageError` unless all files can be written and no file is named twice. `written` maps
    each option to its file; `read` has the files that the command may read, or None. The command
    must not write to a file that it reads.
    """
    files = [path for path in map(Path, map(str, filter(None, read))) if path.is_file()]
    taken = {path.resolve(): f"{path} is read by this command" for path in files}
    for name, path in written.items():
        if path is None:
            continue
        option = f"--{name}"
        check_file(option, path)
        if path.resolve() in taken:
            raise UsageError(f"{option} {path}: {taken[path.resolve()]}; name another file")
        taken[path.resolve()] = f"{option} writes it, too"


def check_folder(option: str, path: Path) -> None:
    """Make the folder of an option. Raises `UsageError` if it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{option} {path}: cannot be made ({error.strerror}); name another"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: may not be written to; name another folder")


def write_json(path: Path | None, found: Any) -> None:
    """Write `found` as indented JSON; do nothing if `path` is None."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")

"""Checks that come before a command starts anything, and the file that keeps its answer."""

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
    """The command line asks for something that cannot be done; says what would do."""


def base_url(text: str) -> str:
    """`text` without the `/v1` that some clients want and this one adds; raises `UsageError`."""
    url = text.rstrip("/").removesuffix("/v1").rstrip("/")
    if not re.match(r"https?://[^/]+", url):
        raise UsageError(f"URL {text!r}: expected http://HOST:PORT")
    return url


def check_profile(name: str) -> None:
    """Raises `UsageError` for a profile that is not there."""
    try:
        profile(name)
    except ValueError as error:
        raise UsageError(f"--profile: {error}") from error


def check_policy(spec: str) -> None:
    """Raises `UsageError` for a policy that cannot be loaded."""
    try:
        load(spec)
    except PolicyError as error:
        raise UsageError(f"--policy: {error}") from error


def check_file(option: str, path: Path) -> None:
    """Raises `UsageError` for a file that could not be written when all is done."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: may not be written; name a file that may")


def check_files(read: Iterable[object], **written: Path | None) -> None:
    """Raises `UsageError` unless the files to write can be, and are neither one another nor read.

    `written` has an option's file by its name, `read` what the command may read, or None.
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
    """Makes the folder; raises `UsageError` where it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{option} {path}: cannot be made ({error.strerror}); name another"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: may not be written to; name another folder")


def write_json(path: Path | None, found: Any) -> None:
    """Writes what was found, for people to read as well; nothing where no file was asked for."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")

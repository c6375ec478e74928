"""The file of keys, read line by line."""

from __future__ import annotations

from pathlib import Path

from router.keys.terms import KeyLine, key_line

MAX_KEYS = 100_000
MAX_FILE_BYTES = 64 << 20


class KeyFileError(ValueError):
    """A line of the key file cannot be used; the text says which, never what it holds."""


def read_keys(path: Path) -> tuple[KeyLine, ...]:
    """Its lines `KEY TENANT [option=value ...]`; `#` begins a comment. Raises KeyFileError.

    KEY is the key itself, `sha256:` and the 64 hex digits of its SHA-256, or `-` for the terms of
    a tenant that trusted peers name.
    """
    lines: list[KeyLine] = []
    seen: dict[bytes | str | None, int] = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            read = key_line(words)
        except ValueError as error:
            raise KeyFileError(f"{path}:{number}: {error}") from None
        whose = read.terms.tenant if read.hashed is None else read.hashed
        if whose in seen:
            what = "the tenant has such a line" if read.hashed is None else "the key occurs twice"
            raise KeyFileError(f"{path}:{number}: {what}, first in line {seen[whose]}")
        seen[whose] = number
        lines.append(read)
        if len(lines) > MAX_KEYS:
            raise KeyFileError(f"{path}: more than {MAX_KEYS} keys")
    return tuple(lines)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise KeyFileError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        # Without its cause, which carries the whole file.
        raise KeyFileError(f"{path}: byte {error.start} is not UTF-8") from None

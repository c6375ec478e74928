"""The file of API keys: each line has a client's key, its tenant, and what the key allows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

_HASHED = re.compile(r"sha256:[0-9a-f]{64}")
_OPTION = re.compile(r"([a-z_]+)=(.+)")
_RANGE = re.compile(r"(-?\d{1,10})\.\.(-?\d{1,10})")
_INT32 = 1 << 31
_MAX_CHARS = 1_024  # of a name, a tenant or a salt, which are kept in memory
NO_KEY = "-"  # in a key's place: the terms of a tenant that trusted peers name


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """The limits and permissions of an API key; None means no limit. Lifetime: until the file is
    read again.
    """

    tenant: str | None = None
    name: str = ""  # for people
    models: tuple[str, ...] = ()  # globs as of `fnmatch`, any of which must match; (): all models
    priority: tuple[int, int] | None = None  # least and greatest that a request may ask for
    weight: float = 1.0  # the tenant's weight in a fair queue
    requests_per_s: float | None = None
    requests_burst: float = 1.0  # requests at once after a pause
    tokens_per_s: float | None = None  # prompt and answer
    tokens_burst: float = 1.0
    inflight: int | None = None  # requests at the same time
    salt: str | None = None  # of the caches that its requests may share

    def allows_model(self, model: str) -> bool:
        """Return whether requests with this key may ask for `model`."""
        return not self.models or any(fnmatchcase(model, glob) for glob in self.models)

    @property
    def unlimited(self) -> bool:
        """True if the key has no limit, so that its requests need not be counted."""
        return self.requests_per_s is None and self.tokens_per_s is None and self.inflight is None


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One parsed line of the key file. Lifetime: one reading of the file.

    `hashed` is the SHA-256 of the key; it is None for a line without a key, whose tenant trusted
    peers name.
    """

    hashed: bytes | None
    terms: KeyTerms
    plain: bool = False  # the file has the key itself


def hash_of(key: str) -> bytes:
    """Return the SHA-256 of a key, which is all that the router keeps of it.

    A single round of hashing is enough, because the router's keys are random.
    """
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_line(words: list[str]) -> KeyLine:
    """Parse one line of the key file, whose words are `KEY TENANT [option=value ...]`.

    Raises ValueError; its text never repeats a word that may be a key or a salt.
    """
    if len(words) < 2:
        raise ValueError("expected a key and a tenant")
    key, tenant, *rest = words
    if len(tenant) > _MAX_CHARS:
        raise ValueError(f"the tenant has more than {_MAX_CHARS} characters")
    options: dict[str, Any] = {}
    for number, word in enumerate(rest, start=3):
        found = _OPTION.fullmatch(word)
        if found is None or found[1] not in _OPTIONS:
            known = ", ".join(f"{name}=" for name in _OPTIONS)
            raise ValueError(
                f"word {number}: expected a key, a tenant, then options of these: {known}"
            )
        name, value = found[1], found[2]
        if name in options:
            raise ValueError(f"{name}= is given twice")
        try:
            options[name] = _OPTIONS[name](value)
        except ValueError as error:
            raise ValueError(f"{name}= {error}") from None
    terms = _checked(tenant, options)
    if key == NO_KEY:
        return KeyLine(None, terms)
    if key.startswith("sha256:"):
        if not _HASHED.fullmatch(key):
            raise ValueError("sha256: wants 64 digits of 0-9 a-f after it")
        return KeyLine(bytes.fromhex(key[7:]), terms)
    return KeyLine(hash_of(key), terms, plain=True)


def _checked(tenant: str, options: dict[str, Any]) -> KeyTerms:
    """Return the terms that the options of a line give. A missing burst is set to the requests of
    one second, at least one.
    """
    for kind, least in (("requests", 1.0), ("tokens", 1.0)):
        rate = options.get(f"{kind}_per_s")
        if rate is None and f"{kind}_burst" in options:
            raise ValueError(f"{kind}_burst= needs {kind}_per_s=")
        if rate is not None:
            options.setdefault(f"{kind}_burst", max(rate, least))
    return KeyTerms(tenant=tenant, **{"name": tenant, **options})


def _text(value: str) -> str:
    if len(value) > _MAX_CHARS:
        raise ValueError(f"has more than {_MAX_CHARS} characters")
    return value


def _globs(value: str) -> tuple[str, ...]:
    globs = tuple(value.split(","))
    if "" in globs or len(value) > _MAX_CHARS:
        raise ValueError("wants names or globs with commas between, as in llama-*,qwen3-8b")
    return globs


def _range(value: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(value)
    if found is None or not -_INT32 <= int(found[1]) <= int(found[2]) < _INT32:
        raise ValueError("wants LEAST..GREATEST, as in 0..10; lower is served first")
    return int(found[1]), int(found[2])


def _within(least: float, most: float) -> Callable[[str], float]:
    def number(value: str) -> float:
        try:
            read = float(value)
        except ValueError:
            read = math.nan
        if not least <= read <= most:  # NaN is refused as well
            raise ValueError(f"wants a number of {least:g}..{most:g}")
        return read

    return number


def _count(value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value[:10]) <= 1_000_000):
        raise ValueError("wants a number of 1..1000000, without a fraction")
    return int(value)


_OPTIONS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "name": _text,
        "models": _globs,
        "priority": _range,
        "weight": _within(0.001, 1_000.0),
        "requests_per_s": _within(1e-4, 1e6),
        "requests_burst": _within(1.0, 1e6),
        "tokens_per_s": _within(1e-2, 1e9),
        "tokens_burst": _within(1.0, 1e12),
        "inflight": _count,
        "salt": _text,
    }
)


MAX_KEYS = 100_000
MAX_FILE_BYTES = 64 << 20


class KeyFileError(ValueError):
    """Raised for a bad line of the key file; the message has the line's number, never its text."""


def read_keys(path: Path) -> tuple[KeyLine, ...]:
    """Return the lines `KEY TENANT [option=value ...]` of the file; `#` begins a comment. Raises
    KeyFileError.

    KEY is the key itself, or `sha256:` and the 64 hex digits of its SHA-256, or `-` for the terms
    of a tenant that trusted peers name.
    """
    lines: list[KeyLine] = []
    seen: dict[bytes | str | None, int] = {}
    for number, line in enumerate(_key_file_text(path).splitlines(), start=1):
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


def _key_file_text(path: Path) -> str:
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

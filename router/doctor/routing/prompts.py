"""Examines requests of clients that the operator gives: their cache salts, and how far their
prompts begin alike.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

MOST_PROMPTS = 200
_READ_BYTES = 64 << 10  # bytes of each prompt that are read
_STRETCH_BYTES = 64  # bytes of one prompt that are searched for in another
_LINE_BYTES = 4 << 20
_SHOWN_CHARS = 48
_ID = struct.Struct("<q")
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error)


class GivenFileError(Exception):
    """Raised when a file of requests cannot be read; the text says which file and why."""


@dataclass(frozen=True, slots=True)
class GivenPrompts:
    """Describes what the given requests have in common. Sizes are in bytes; each size is a median
    over the requests.
    """

    count: int
    salts: int = 0  # distinct ones
    salted: int = 0  # requests that have one
    common: int = 0  # bytes that a prompt begins with, as an earlier one does
    later: int = 0  # bytes that it shares with the earlier one behind the first difference
    differs: str = ""  # the text at the first difference of one of them


def given_prompts(path: Path) -> GivenPrompts:
    """Return what the requests in a file have in common. The file has one request body a line.
    Raises GivenFileError if the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = [file.readline(_LINE_BYTES) for _ in range(MOST_PROMPTS)]
    except OSError as error:
        raise GivenFileError(f"{path}: {error.strerror or error}") from error
    bodies = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            prompt = prompt_bytes(body)
        except _UNREADABLE as error:
            raise GivenFileError(f"{path} line {number}: no request of a client") from error
        salt = body.get("cache_salt")
        bodies.append((salt if isinstance(salt, str) else None, prompt))
    if not bodies:
        raise GivenFileError(f"{path}: no request in it")
    return compared(bodies)


def prompt_bytes(body: dict[str, Any]) -> bytes:
    """Return the beginning of a request's prompt. Raises one of the errors in `_UNREADABLE` if the
    body has no prompt.
    """
    if "messages" in body:
        parts = [body.get("tools"), body.get("system"), *body["messages"]]
        text = "\n".join(_plain(part) for part in parts if part)
        return text.encode("utf-8", "replace")[:_READ_BYTES]
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "replace")[:_READ_BYTES]
    if prompt and isinstance(prompt[0], int):
        return b"".join(_ID.pack(one) for one in prompt[: _READ_BYTES // _ID.size])
    return prompt_bytes({"prompt": prompt[0]})


def compared(bodies: Sequence[tuple[str | None, bytes]]) -> GivenPrompts:
    """Return the counts of salts, and what the prompts have in common. Each prompt is compared with
    the one before it and with the first.
    """
    salts = [salt for salt, _ in bodies if salt]
    common, later, differs = [], [], ""
    for place in range(1, len(bodies)):
        prompt = bodies[place][1]
        earlier = {bodies[place - 1][1], bodies[0][1]}
        same, other = max((_common(prompt, one), one) for one in earlier)
        more = _stretch(prompt[same:], other[same:])
        common.append(same)
        later.append(more)
        if more > same and not differs:
            differs = _shown(prompt[same:])
    return GivenPrompts(
        len(bodies),
        len(set(salts)),
        len(salts),
        median_low(common or [0]),
        median_low(later or [0]),
        differs,
    )


def _plain(part: Any) -> str:
    """Return the text in a part of a chat without the punctuation of JSON."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "\n".join(map(_plain, part))
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and "content" in part:
        return _plain(part["content"])
    return json.dumps(part)


def _common(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the longest common beginning of two texts."""
    most = min(len(one), len(other))
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _stretch(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the first long passage of `one` that also occurs in `other`."""
    for at in range(0, max(len(one) - _STRETCH_BYTES, 0), _STRETCH_BYTES):
        found = other.find(one[at : at + _STRETCH_BYTES])
        if found >= 0:
            return _common(one[at:], other[found:])
    return 0


def _shown(differing: bytes) -> str:
    """Return a few of the differing characters as text for people, or "" if they are not text."""
    text = differing[:_SHOWN_CHARS].decode("utf-8", "replace")
    return text if _is_text(text) else ""


def _is_text(text: Iterable[str]) -> bool:
    return all(c.isprintable() or c.isspace() for c in text)

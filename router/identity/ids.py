"""Checks the form of ids that clients send."""

from __future__ import annotations

from typing import Any

MAX_ID_CHARS = 256


def id_in(value: Any) -> str | None:
    """Return `value` if it is a valid id, otherwise None.

    An id is a text of 1 to 256 characters without control characters and lone surrogates. Other
    routers have about the same limit (Dynamo and CLIProxyAPI take at most 256 bytes, 2026).
    """
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        return None
    if not value.isprintable():
        return None
    return value


def within(group: str, agent: str) -> str:
    """Return a session id made of an agent's id and the id of its group, because the agent's id is
    unique only within the group.
    """
    return f"{group}/{agent}"

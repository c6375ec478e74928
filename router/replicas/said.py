"""Our own stream in Redis: commands that append to it and keep it short."""

from __future__ import annotations

from collections import deque
from typing import Any

from router.replicas.redis_wire import Command

MESSAGE = b"m"
GOODBYE = b"bye"

KEPT_ENTRIES = 1_024
KEPT_BYTES = 16 << 20
_WORD_BYTES = 64  # of an entry besides its payload, by a rough count


class Said:
    """Lifetime: while the link is up.

    Redis bounds a stream by entries only, so what to keep is reckoned here: the id of the oldest
    entry within both bounds. Redis may keep a little more (`~`, at most a node of its tree).
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._entries: deque[tuple[bytes, int]] = deque()  # id, bytes
        self._kept_bytes = 0
        self._trim = False

    def command(self, payload: bytes) -> Command:
        """The next XADD."""
        trim: Command = ()
        if self._trim and self._entries:
            trim, self._trim = ("MINID", "~", self._entries[0][0]), False
        return ("XADD", self._key, *trim, "*", MESSAGE, payload)

    def appended(self, entry_id: Any, payload_bytes: int) -> None:
        """Redis' reply to one of them."""
        if not isinstance(entry_id, bytes):
            return
        size_bytes = payload_bytes + _WORD_BYTES
        self._entries.append((entry_id, size_bytes))
        self._kept_bytes += size_bytes
        while len(self._entries) > KEPT_ENTRIES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._entries.popleft()[1]
            self._trim = True

"""Collects in memory a worker's answer that is for the router itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvkernels
from router.http.framing import parse_head
from router.http.reply import (
    HeldReply,
    ReplyHead,
)

if TYPE_CHECKING:
    pass


class CollectedReply:
    """A `ReplySink` that keeps a worker's answer to the router itself. Lifetime: prefill leg."""

    movable = False
    dechunk = True
    congested = False

    def __init__(self, limit_bytes: int) -> None:
        """Keep at most `limit_bytes` of the body; a longer reply is not `whole`."""
        self.limit_bytes = limit_bytes
        self.whole = False
        self._held: tuple[bytes, str] | None = None  # the head as it came, and the method
        self._head: ReplyHead | None = None
        self._data: list[bytes] = []
        self._bytes = 0

    def head(self, head: ReplyHead) -> None:
        """Keep the status and headers of the reply."""
        self._head = head

    def data(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= self.limit_bytes:
            self._data.append(data)

    async def drain(self) -> None:
        return

    def finish(self) -> None:
        self.whole = self._bytes <= self.limit_bytes

    def abort(self, late: bool = False) -> None:
        self.whole = False

    def take(self, end: kvkernels.RelayEnd, method: str) -> None:
        """Store the reply that the relay's thread has collected."""
        self._held, self._data, self.whole = (end.held_head, method), [end.held_body], True

    @property
    def body(self) -> bytes:
        """The body of the reply, without bytes beyond the limit."""
        return b"".join(self._data)

    @property
    def held(self) -> HeldReply | None:
        """The reply in a form that can be sent to the client; None if no reply arrived."""
        if self._head is None and self._held is not None:
            self._head = parse_head(*self._held)
        return None if self._head is None or not self.whole else HeldReply(self._head, self.body)

"""Writes a reply to a client whose body has other framing than the worker's, because it differs
from the worker's body.
"""

from __future__ import annotations

from router.http.messages import Request
from router.http.reply import Header
from router.upstream.client_reply import ClientReply


class FramedReply(ClientReply):
    """A `ClientReply` that gets its body without framing, and frames it itself. Lifetime: request.

    A subclass writes the body with `write_framed`, and calls `end_frames` after its last bytes.
    """

    chunks = False  # the client gets the body in chunks

    def __init__(
        self, request: Request, buffer_bytes: int, extra_headers: tuple[Header, ...]
    ) -> None:
        """Make the reply; the arguments are those of `ClientReply`."""
        super().__init__(request, buffer_bytes, extra_headers)
        self.dechunk = True

    def write_framed(self, data: bytes) -> None:
        """Write bytes of the body, and before the first of them the head."""
        if self.chunks and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if data or self._begun:
            self._write(data)

    def end_frames(self) -> None:
        """Write the end of the body."""
        if self.chunks:
            self._write(b"0\r\n\r\n")

"""Writes a reply to a client whose body is an edited form of the worker's, and therefore has its
own framing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from router.http.messages import Request
from router.http.reply import Framing, Header, ReplyHead
from router.upstream.client_reply import ClientSocket
from router.upstream.framed_reply import FramedReply

_BUFFERED_BYTES = 1 << 20  # a body with a known length up to this is buffered and edited as a whole
_REFRAMED = frozenset({b"content-length", b"transfer-encoding", b"trailer"})


class Editor(Protocol):
    """Changes the body of one reply while it is relayed. Lifetime: reply."""

    def begin(self, head: ReplyHead) -> bool:
        """Return True if the body of a reply with this head is to be edited."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the body, and return the bytes that the client gets now."""

    def flush(self) -> bytes:
        """Return the last bytes for the client, after the body has ended."""


class EditedReply(FramedReply):
    """A `ClientReply` whose body an `Editor` changes. Lifetime: request.

    The relay passes it the body without framing, and it frames the edited body by chunks, or by its
    length if the whole body is known.
    """

    def __init__(
        self,
        request: Request,
        buffer_bytes: int,
        extra_headers: tuple[Header, ...],
        editor: Editor,
    ) -> None:
        """Make a reply that `editor`, which belongs to it alone, changes. The other arguments are
        those of `ClientReply`.
        """
        super().__init__(request, buffer_bytes, extra_headers)
        self._editor = editor
        self._edits = False
        self._whole: list[bytes] | None = None  # a body that is edited once all of it is there
        self._whole_head: ReplyHead

    def lend(self) -> ClientSocket | str:
        """Return the word for why the relay's thread cannot write this reply: the thread cannot
        edit.
        """
        return "renamed"

    def head(self, head: ReplyHead) -> None:
        framed = head.framing is not Framing.NONE and head.status not in (204, 304)
        self._edits = framed and self._editor.begin(head)
        short = head.framing is Framing.LENGTH and head.length <= _BUFFERED_BYTES
        if self._edits and short and not head.event_stream:
            self.status = head.status
            self._whole_head, self._whole = head, []
            return
        if self._edits or head.framing is Framing.CHUNKED:
            head = _by_chunks(head)
        self.chunks = head.framing is Framing.CHUNKED and not self.http_1_0
        super().head(head)

    def data(self, data: bytes) -> None:
        if self._whole is not None:
            self._whole.append(data)
            return
        self.write_framed(self._editor.feed(data) if self._edits else data)

    def finish(self) -> None:
        if self._whole is not None:
            body = self._editor.feed(b"".join(self._whole)) + self._editor.flush()
            self._whole = None
            kept = _without_framing(self._whole_head.headers)
            headers = (*kept, (b"Content-Length", b"%d" % len(body)))
            super().head(replace(self._whole_head, headers=headers, length=len(body)))
            self._write(body)
        else:
            if self._edits:
                self.write_framed(self._editor.flush())
            self.end_frames()
        super().finish()


def _by_chunks(head: ReplyHead) -> ReplyHead:
    return replace(head, headers=_without_framing(head.headers), framing=Framing.CHUNKED, length=0)


def _without_framing(headers: tuple[Header, ...]) -> tuple[Header, ...]:
    return tuple(header for header in headers if header[0].lower() not in _REFRAMED)

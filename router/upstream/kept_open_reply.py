"""Writes a stream's reply whose head is sent to the client before any worker answers."""

from __future__ import annotations

import msgspec

from router.http.errors import error_body, error_type
from router.http.messages import Request
from router.http.reply import PING, Framing, Header, ReplyHead
from router.upstream.client_reply import ClientSocket
from router.upstream.edited_reply import Editor
from router.upstream.framed_reply import FramedReply

_HEAD = ReplyHead(
    200,
    b"OK",
    ((b"Content-Type", b"text/event-stream; charset=utf-8"), (b"Cache-Control", b"no-cache")),
    Framing.CHUNKED,
    event_stream=True,
)
_ERROR_BEGINNINGS = (b'{"type":"error"', b'{"type": "error"')  # as Anthropic's API begins an error
_MAX_ERROR_BYTES = 65_536  # longest worker's error that is turned into an event, bytes


class KeptOpenReply(FramedReply):
    """A `ClientReply` that sends comments while its request waits, so that no proxy closes the
    connection as idle. Lifetime: request.

    Its status is 200 from the first comment on; an error that would otherwise have its own status
    is then an event. Of a worker's answer, the client gets only the body. Several attempts may
    write to it one after another, as long as no earlier attempt has written.
    """

    def __init__(
        self, request: Request, buffer_bytes: int, extra_headers: tuple[Header, ...], is_named: bool
    ) -> None:
        """Make the reply. `is_named` True means that the protocol's events have names, as in
        Anthropic's API. The other arguments are those of `ClientReply`.
        """
        super().__init__(request, buffer_bytes, extra_headers)
        self._is_named = is_named
        self._answered = False  # an attempt has written to it
        self._editor: Editor | None = None
        self._refusal: list[bytes] | None = None  # of a worker
        self._refusal_bytes = 0
        self._refusal_status = 0
        self.chunks = not self.http_1_0

    @property
    def begun(self) -> bool:
        return self._answered

    def lend(self) -> ClientSocket | str:
        """Return the word for why the relay's thread cannot write this reply: the thread would
        write a head.
        """
        return "pinged"

    def ping(self) -> None:
        """Write a comment, and before it the head if the client has not received it yet."""
        if self.congested or self._answered or self._refusal is not None:
            return
        if not self.body_length:
            super().head(_HEAD)
        self.write_framed(PING)

    def follow(self, editor: Editor | None) -> None:
        """Take the answer of the next attempt. `editor` changes its body; None leaves it unchanged.

        Once an answer has begun, its editor stays, because another worker only continues that
        answer.
        """
        self._refusal, self._refusal_bytes = None, 0
        if not self._answered:
            self._editor = editor

    def head(self, head: ReplyHead) -> None:
        if not (head.answers and head.event_stream and not head.coded):
            self._refusal, self._refusal_status = [], head.status
        elif self._editor is not None and not self._editor.begin(head):
            self._editor = None

    def data(self, data: bytes) -> None:
        if self._refusal is not None:
            self._refusal_bytes += len(data)
            if self._refusal_bytes <= _MAX_ERROR_BYTES:
                self._refusal.append(data)
            return
        self._answered = True
        self.write_framed(data if self._editor is None else self._editor.feed(data))

    def finish(self) -> None:
        if self._refusal is not None:
            whole = self._refusal_bytes <= _MAX_ERROR_BYTES
            self.fail(_error_of(b"".join(self._refusal) if whole else b"", self._refusal_status))
            return
        self._answered = True
        if self._editor is not None:
            self.write_framed(self._editor.flush())
        self.end_frames()

    def fail(self, error: bytes) -> None:
        """End the reply with an event that contains this error, which is the JSON body of an error
        answer.
        """
        self._answered = True
        line = b" ".join(error.splitlines())
        if self._is_named and not line.startswith(_ERROR_BEGINNINGS):
            line = line.replace(b"{", b'{"type":"error",', 1)
        name = b"event: error\n" if self._is_named else b""
        self.write_framed(b"%bdata: %b\n\n" % (name, line))
        self.end_frames()


class _Error(msgspec.Struct):
    error: dict[str, object] | str


_ERROR = msgspec.json.Decoder(_Error)


def _error_of(body: bytes, status: int) -> bytes:
    """Return a worker's error as JSON: the reply's body if it is an error in JSON, otherwise an
    error made from its status.
    """
    try:
        _ERROR.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = f"the worker answered with status {status}, and no stream of events"
        return error_body(said, error_type(status), None, "worker_error")
    return body

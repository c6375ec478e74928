"""Tells a worker that has not got a path from one that refuses a request, before the client can.

Engines differ in what they serve, by version and by how they were started, and none of them says
so. An answer of 404, 405 or 501 is read before anybody gets it: where it speaks of the path, the
request goes to another worker, and this one is not asked for the path again.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from router.http.errors import WorkerError
from router.http.relay.framing import Body, follow
from router.http.relay.reply import HeldReply, Outcome, RelayLimits, ReplyHead, ReplySink

_STATUSES = frozenset({404, 405, 501})
_READ_BYTES = 16_384  # a longer answer is no "not found"
_FRAMING = RelayLimits()
# What servers say of a path that they have not got: Starlette, which vLLM, SGLang, TensorRT-LLM and
# Triton's frontend run on, for 404 and 405; our own engine by the beginning of its message.
_DETAILS = frozenset({"Not Found", "Method Not Allowed"})
_OURS = "no such path: "
_LLAMA_CPP = "File Not Found"


class _Error(msgspec.Struct):
    message: str = ""


class _Denial(msgspec.Struct):
    detail: msgspec.Raw = msgspec.Raw(b"null")
    error: _Error | str | None = None


_DENIAL = msgspec.json.Decoder(_Denial)


class Sieve:
    """A `ReplySink` before the client's: it keeps back what says that there is no such path.

    Lifetime: one dispatch.
    """

    def __init__(self, reply: ReplySink) -> None:
        self._reply = reply
        self._head: ReplyHead | None = None  # kept back
        self._body: Body
        self._data: list[bytes] = []
        self._payload: list[bytes] = []
        self._read_bytes = 0
        self._absent = False
        self._broken = False  # it ended before it was understood

    @property
    def movable(self) -> bool:
        return self._reply.movable

    @property
    def dechunk(self) -> bool:
        return self._reply.dechunk

    @property
    def congested(self) -> bool:
        return self._reply.congested

    def head(self, head: ReplyHead) -> None:
        """As of `ReplySink`, and so are the others."""
        if head.status in _STATUSES:
            self._head = head
            self._body = follow(head, _FRAMING)
        else:
            self._reply.head(head)

    def data(self, data: bytes) -> None:
        if self._head is None:
            self._reply.data(data)
            return
        self._data.append(data)
        self._payload.append(data if self.dechunk else self._body.feed(data))
        self._read_bytes += len(data)
        if self._read_bytes > _READ_BYTES:
            head, self._head = self._head, None
            self._reply.head(head)
            self._reply.data(b"".join(self._data))

    async def drain(self) -> None:
        await self._reply.drain()

    def finish(self) -> None:
        if self._head is None:
            self._reply.finish()
            return
        body = b"".join(self._payload)
        self._absent = says_absent(self._head.status, body)
        if not self._absent:
            HeldReply(self._head, body).deliver(self._reply)

    def abort(self) -> None:
        if self._head is None:
            self._reply.abort()
        else:
            self._broken = True

    def judged(self, outcome: Outcome) -> Outcome:
        """What became of the dispatch, as far as the client is concerned."""
        if self._absent:
            error = WorkerError("absent", "the worker has not got this path")
            return replace(outcome, error=error, bytes_to_client=0)
        return replace(outcome, bytes_to_client=0) if self._broken else outcome


def says_absent(status: int, body: bytes) -> bool:
    """Whether an answer of 404, 405 or 501 means the path, and not the model or something else
    that the request names.
    """
    if status != 404 or not body:
        return True
    try:
        denial = _DENIAL.decode(body)
        detail = msgspec.json.decode(denial.detail)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # a page for people, of a server that knows nothing of the API
    if isinstance(denial.error, _Error):
        return denial.error.message.startswith((_OURS, _LLAMA_CPP))
    return isinstance(detail, str) and detail in _DETAILS

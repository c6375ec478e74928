"""The client's side of the relay: a reply whose bytes go to the transport as they are.

aiohttp reads requests, keeps connections alive and answers what is not relayed; this response
writes by itself. It relies on aiohttp calling nothing of a response but `prepare`, `write_eof`,
`keep_alive` and what an access log reads; `tests/router/test_relay_client.py` pins that.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from router.http.relay.head import end_to_end
from router.http.relay.reply import Framing, Header, ReplyHead, UpstreamRequest

# What the server in front needs for the relay to be right. Without cancellation a client that
# leaves during a silent prefill goes unnoticed; with decompression bodies would change.
SERVER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"handler_cancellation": True, "auto_decompress": False}
)
RANK_HEADER = b"x-data-parallel-rank"  # vLLM from 0.14, SGLang
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, zero seconds


def upstream_request(
    request: web.BaseRequest,
    body: bytes,
    internal_headers: tuple[Header, ...] = (),
    keep_authorization: bool = True,
    rank: int | None = None,
) -> UpstreamRequest:
    """The client's request as it came, ready for `Upstream.send`.

    `keep_authorization`: False where the client's key is for this router alone. `rank`: of the
    worker's engine that shall answer; a client's own wish does not count then.
    """
    target = request.raw_path
    if not target.startswith("/"):  # absolute form, as proxies are asked: scheme://host/path
        target = "/" + target.partition("://")[2].partition("/")[2]
    headers = tuple(request.raw_headers)
    if not keep_authorization:
        headers = tuple(h for h in headers if h[0].lower() != b"authorization")
    if rank is not None:
        headers = tuple(h for h in headers if h[0].lower() != RANK_HEADER)
        internal_headers = (*internal_headers, (RANK_HEADER, b"%d" % rank))
    return UpstreamRequest(request.method, target, headers, body, internal_headers)


class ClientReply(web.StreamResponse):
    """A `ReplySink` that a handler returns once the relay is through. Lifetime: request."""

    def __init__(
        self,
        request: web.BaseRequest,
        buffer_bytes: int = 262_144,
        extra_headers: tuple[Header, ...] = (),
    ) -> None:
        """`buffer_bytes`: unread by the client before the worker is paused. `extra_headers` are
        added to the worker's own.
        """
        super().__init__()
        self._client = request
        self._extra_headers = extra_headers
        self._http_1_0 = request.version < (1, 1)
        self._persistent = False
        self._ends_with_connection = False
        self._begun = b""  # the head, until the bytes that follow it in the same turn
        self._written_bytes = 0
        if request.transport is not None:
            request.transport.set_write_buffer_limits(high=buffer_bytes)

    @property
    def dechunk(self) -> bool:
        """HTTP/1.0 knows no chunks."""
        return self._http_1_0

    @property
    def client_transport(self) -> asyncio.Transport | None:
        """Where the bytes go; None once the client is gone."""
        return self._client.transport

    @property
    def congested(self) -> bool:
        """More than `buffer_bytes` wait for the client."""
        return self._client.protocol.writing_paused

    def head(self, head: ReplyHead) -> None:
        """Begin the reply with the worker's status and headers, hop-by-hop ones rewritten."""
        self.set_status(head.status, head.reason.decode("latin-1"))
        chunked = head.framing is Framing.CHUNKED
        self._ends_with_connection = head.framing is Framing.CLOSE or (chunked and self.dechunk)
        self._persistent = self._client.keep_alive and not self._ends_with_connection
        lines = [b"HTTP/1.1 %d %s" % (head.status, head.reason)]
        for name, value in end_to_end(head.headers):
            if head.status != 204 or name.lower() != b"content-length":
                lines.append(name + b": " + value)
        lines += [name + b": " + value for name, value in self._extra_headers]
        if chunked and not self.dechunk:
            lines.append(b"Transfer-Encoding: chunked")
        if not self._persistent:
            lines.append(b"Connection: close")
        elif self._http_1_0:
            lines.append(b"Connection: keep-alive")
        self._begun = b"\r\n".join(lines) + b"\r\n\r\n"

    def data(self, data: bytes) -> None:
        """Body bytes as they came from the worker."""
        self._write(data)

    async def drain(self) -> None:
        """Wait until the client has read. Raises ConnectionError when it is gone."""
        await self._client.writer.drain()

    def finish(self) -> None:
        """The reply is complete; aiohttp goes on with the connection or closes it."""
        if self._begun:
            self._write(b"")

    def abort(self) -> None:
        """End the connection so that the client cannot take the reply for complete."""
        self._persistent = False
        transport = self._client.transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        if self._ends_with_connection and sock is not None:
            # Its end is the body's end: only a reset says that this one came too early.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()

    def _write(self, data: bytes) -> None:
        if self._begun:
            data = self._begun + data
            self._begun = b""
        self._written_bytes += len(data)
        # aiohttp looks here before it would answer 500 into a reply that has begun.
        self._client.writer.output_size = self._written_bytes
        transport = self._client.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    # What aiohttp calls.

    @property
    def keep_alive(self) -> bool | None:
        """Whether the client's connection outlives this reply."""
        return self._persistent

    @property
    def body_length(self) -> int:
        """Bytes written, for an access log."""
        return self._written_bytes

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to prepare: the head was the worker's."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to end: the framing was the worker's."""

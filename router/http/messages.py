"""A client's request, and the answers that the router writes itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, unquote

import msgspec

from router.http.errors import ClientError, error_body, error_type

if TYPE_CHECKING:
    import asyncio

    from router.http.parser import Head

_REASONS = MappingProxyType({int(status): status.phrase for status in HTTPStatus})
_BODYLESS = frozenset({204, 304})
# Headers of each answer of the router, so that no browser takes it for a page.
NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


class ClientConnection(Protocol):
    """The interface to a client's connection for code that answers its requests."""

    host: str  # the peer's address; empty: it has none
    transport: asyncio.Transport | None  # None: the client is gone
    writing_paused: bool
    # Asks for the socket back while another part writes to it.
    lent_to: Callable[[], object] | None

    @property
    def goes_on(self) -> bool: ...  # after the answer
    async def drain(self) -> None: ...  # until the client has read


class Request:
    """One request of a client with its body. Lifetime: request."""

    __slots__ = (
        *("body", "connection", "head", "headers", "method", "path", "target", "written_bytes"),
    )

    def __init__(self, connection: ClientConnection, head: Head, body: bytes) -> None:
        self.connection = connection
        self.head = head
        self.body = body
        self.method = head.method
        self.target = target = head.target  # as it came
        path = target.partition("?")[0]
        if "%" in path or path[0] != "/":
            path = _decoded(path)
        self.path = path  # decoded, without the query
        self.headers = head.headers  # `get(name)` gives the first value, whatever the case
        self.written_bytes = 0  # of a relayed answer, so far

    @property
    def fields(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers as received, in order."""
        return self.headers.fields()

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters in the query of the request's target; if a name occurs twice, its first
        value counts.
        """
        pairs = parse_qsl(self.target.partition("?")[2], keep_blank_values=True)
        return dict(reversed(pairs))

    @property
    def http_1_0(self) -> bool:
        """True if the client uses HTTP/1.0, which does not know chunked bodies."""
        return self.head.http_1_0

    @property
    def remote(self) -> str | None:
        """The client's address, or None if it is unknown."""
        return self.connection.host or None

    @property
    def peer(self) -> str | None:
        """The address of the peer that vouches for the request: the client itself, or a proxy such
        as Envoy. It is None if it is unknown.
        """
        return self.remote

    @property
    def keep_alive(self) -> bool:
        """True if the client's connection stays open after the answer."""
        return self.connection.goes_on


@dataclass(slots=True)
class Response:
    """A complete answer that the router writes itself. Lifetime: request."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    keep_alive: bool = True  # False: the connection ends after it

    @property
    def body_length(self) -> int:
        """The number of bytes in the body, for the access log."""
        return len(self.body)

    def text(
        self, date: str, *, goes_on: bool, http_1_0: bool = False, head: bool = False
    ) -> bytes:
        """Return the answer as the bytes of an HTTP message. `goes_on` True means that the
        connection stays open; `head` True leaves the body out.
        """
        lines = [f"HTTP/1.1 {self.status} {_REASONS.get(self.status, '')}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if self.status not in _BODYLESS:
            lines.append(f"Content-Type: {self.content_type}")
            lines.append(f"Content-Length: {len(self.body)}")
        lines += [f"Date: {date}", ": ".join(NO_SNIFFING)]
        if not goes_on:
            lines.append("Connection: close")
        elif http_1_0:
            lines.append("Connection: keep-alive")
        text = "\r\n".join(lines).encode() + b"\r\n\r\n"
        return text if head or self.status in _BODYLESS else text + self.body


class Relayed(Protocol):
    """The status and size of a worker's answer, after the relay has written it to the client."""

    @property
    def status(self) -> int: ...
    @property
    def keep_alive(self) -> bool: ...  # the client's connection outlives it
    @property
    def body_length(self) -> int: ...  # bytes written


Answer = Response | Relayed
Handler = Callable[[Request], Awaitable[Answer]]


def json_response(value: Any, status: int = 200) -> Response:
    """Return a response with `value` as JSON."""
    return Response(status, msgspec.json.encode(value))


def error_response(status: int, message: str, code: str | None = None) -> Response:
    """Return an error in the form that OpenAI's clients read."""
    return Response(status, error_body(message, error_type(status), code=code))


def refused(error: ClientError) -> Response:
    """Return the error response for a `ClientError`."""
    return Response(error.status, error.body(), dict(error.headers))


def _decoded(path: str) -> str:
    """Return the decoded path of a request target, without scheme and host. An escaped slash does
    not become a separator.
    """
    if not path.startswith("/"):  # absolute form, as proxies are asked: scheme://host/path
        path = "/" + path.partition("://")[2].partition("/")[2]
    return unquote(path.replace("%2F", "%252F").replace("%2f", "%252f"))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason to refuse a request or a connection, with the status and text of its response.
    Lifetime: process.
    """

    reason: str  # as the metric and the error's `code` name it
    status: int
    message: str  # never repeats the client's own words

    def response(self, body_bytes: int) -> Response:
        """Return the response for this refusal. `body_bytes` is the largest allowed body, which the
        text may mention.
        """
        message = self.message
        if self.reason == "body_too_large":
            message = f"{message}: at most {body_bytes} bytes (limits.body_bytes)"
        response = error_response(self.status, message, self.reason)
        if self.reason.startswith("too_many"):
            response.headers["Retry-After"] = "1"
        return response


_ALL = (
    Refusal("bad_request_line", 400, "the request line is not `METHOD /path HTTP/1.1`"),
    Refusal(
        "bad_version",
        400,
        "only HTTP/1.0 and HTTP/1.1 are spoken here; gRPC has a port of its own (--grpc-port)",
    ),
    Refusal("bad_header", 400, "a header is not `name: value`, or has forbidden characters"),
    Refusal("bad_line_end", 400, "lines of a head end with CRLF"),
    Refusal("folded_header", 400, "a header goes on over several lines"),
    Refusal("bad_host", 400, "HTTP/1.1 asks for one Host header"),
    Refusal("repeated_header", 400, "a header that may occur once occurs twice"),
    Refusal("bad_length", 400, "Content-Length is not one number"),
    Refusal("two_framings", 400, "Content-Length and Transfer-Encoding are both given"),
    Refusal("bad_coding", 400, "Transfer-Encoding is understood as `chunked` and in HTTP/1.1 only"),
    Refusal("bad_connection", 400, "Connection is not a list of names"),
    Refusal("lookalike_header", 400, "a header's name differs from a framing one by an underscore"),
    Refusal("bad_chunk", 400, "the chunked body has no readable size, or does not keep to it"),
    Refusal("tiny_chunks", 400, "the chunked body consists of very small chunks"),
    Refusal("bad_method", 405, "TRACE, CONNECT and unknown methods are not served"),
    Refusal("bad_expectation", 417, "Expect is understood as `100-continue` only"),
    Refusal(
        "head_too_large",
        431,
        "the head is too large or has too many headers (server.head_bytes, limits.header_bytes)",
    ),
    Refusal("body_too_large", 413, "the body is larger than this router takes"),
    Refusal(
        "bodies_full",
        503,
        "too many bodies are arriving at once; try again (server.arriving_bytes)",
    ),
    Refusal("late_head", 408, "the head did not arrive in time (server.head_s)"),
    Refusal("late_body", 408, "the body did not arrive in time (server.body_s)"),
    Refusal("too_many_connections", 503, "too many connections; try again (server.connections)"),
    Refusal("too_many_files", 503, "the router may open no more files; try again"),
    Refusal(
        "too_many_of_address",
        503,
        "too many connections from this address (server.connections_per_address)",
    ),
)
REFUSALS: Mapping[str, Refusal] = MappingProxyType({each.reason: each for each in _ALL})
# Reasons for which a connection is closed without a word.
GIVEN_UP = ("silent", "bad_handshake", "slow_reader", "slow_close")

"""Answers of the router's own, errors and refusals included, as OpenAI-shaped JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from router.request.errors import ClientError, error_body, error_type


class Headers(Protocol):
    """A request's headers."""

    def get(self, name: str, /) -> str | None:
        """The first value under a name, whose letters count without case."""
        ...


class Writing(Protocol):
    """Whether the client's connection takes more."""

    @property
    def writing_paused(self) -> bool: ...


class Written(Protocol):
    """What the client was given so far."""

    output_size: int  # bytes of the answer

    async def drain(self) -> None:
        """Wait until the client has read. Raises ConnectionError when it is gone."""
        ...


class ClientRequest(Protocol):
    """As much of `aiohttp.web.BaseRequest` as inference needs: the door's own requests are this,
    too. Lifetime: request.
    """

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...  # decoded, without the query
    @property
    def raw_path(self) -> str: ...  # the target as it came
    @property
    def version(self) -> tuple[int, int]: ...
    @property
    def headers(self) -> Headers: ...
    @property
    def raw_headers(self) -> tuple[tuple[bytes, bytes], ...]: ...  # as they came
    @property
    def remote(self) -> str | None: ...  # the peer's address
    @property
    def keep_alive(self) -> bool: ...  # its connection goes on after the answer
    @property
    def transport(self) -> asyncio.Transport | None: ...  # None once the client is gone
    @property
    def protocol(self) -> Writing: ...
    @property
    def writer(self) -> Written: ...
    async def read(self) -> bytes:
        """The whole body."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Lifetime: process."""

    reason: str  # as the metric and the error's `code` name it
    status: int
    message: str  # never repeats what the client wrote


_ALL = (
    Refusal("bad_request_line", 400, "the request line is not `METHOD /path HTTP/1.1`"),
    Refusal("bad_version", 400, "only HTTP/1.0 and HTTP/1.1 are spoken here"),
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
    Refusal("head_too_large", 431, "the head is too large or has too many headers"),
    Refusal("body_too_large", 413, "the body is larger than this router takes"),
    Refusal("bodies_full", 503, "too many bodies are arriving at once; try again"),
    Refusal("late_head", 408, "the head did not arrive in time"),
    Refusal("late_body", 408, "the body did not arrive in time"),
    Refusal("too_many_connections", 503, "too many connections; try again"),
    Refusal("too_many_of_address", 503, "too many connections from this address"),
)
REFUSALS: Mapping[str, Refusal] = MappingProxyType({each.reason: each for each in _ALL})
# Reasons for which a connection is closed without a word.
GIVEN_UP = ("silent", "bad_handshake", "slow_reader", "slow_close")
# What each answer of ours says, so that no browser takes it for a page.
NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


log = logging.getLogger(__name__)

_SHOWN_DEFAULT, _SHOWN_MAX = 20, 1_000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# As `Handler`, of requests whoever read them.
Answering = Callable[[ClientRequest], Awaitable[web.StreamResponse]]
R = TypeVar("R", bound=ClientRequest)


def json_response(value: Any, status: int = 200) -> web.Response:
    """`value` as JSON."""
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )


def shown_count(request: web.Request, name: str) -> int:
    """How many rows a query wants to see: 1..1000, 20 if it does not say.

    Raises ClientError (400) for anything else.
    """
    text = request.query.get(name, str(_SHOWN_DEFAULT))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _SHOWN_MAX):
        raise ClientError(400, f"`{name}` must be 1..{_SHOWN_MAX}", name)
    return int(text)


def error_response(status: int, message: str, code: str | None = None) -> web.Response:
    """An error in the shape OpenAI's clients read."""
    body = error_body(message, error_type(status), code=code)
    return web.Response(status=status, body=body, content_type="application/json")


def errors_as_json(on_fault: Callable[[int], None]) -> Any:
    """The middleware that turns exceptions into answers and blame."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await answered(request, handler, on_fault)
        except web.HTTPException as error:
            on_fault(error.status)
            answer = error_response(error.status, _explained(request, error))
            answer.headers.update({k: v for k, v in error.headers.items() if k.lower() == "allow"})
            return answer

    return middleware


async def answered(
    request: R,
    handler: Callable[[R], Awaitable[web.StreamResponse]],
    on_fault: Callable[[int], None],
) -> web.StreamResponse:
    """The handler's answer, or what its exception becomes. Raises OSError: the client left."""
    try:
        return await handler(request)
    except ClientError as error:
        on_fault(error.status)
        return web.Response(
            status=error.status,
            body=error.body(),
            content_type="application/json",
            headers=error.headers,
        )
    except web.HTTPException:
        raise
    except OSError as error:
        log.debug("client of %s left: %r", request.path, error)
        raise
    except Exception:
        # Ours: it stays loud, and the client learns that it is not to blame.
        log.exception("failed to answer %s %s", request.method, request.path)
        on_fault(500)
        return error_response(500, "internal error of the router", "internal_error")


def _explained(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        paths = sorted({r.resource.canonical for r in request.app.router.routes() if r.resource})
        return f"{request.method} {request.path} is not served here; served: {', '.join(paths)}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return f"{request.path} takes {allowed}, not {request.method}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body is larger than the limit of {request.app._client_max_size} bytes"
    return error.reason

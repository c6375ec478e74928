"""Answers of the admin port: JSON, and errors in OpenAI's shape, whatever goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from router.request.errors import ClientError, error_body, error_type

log = logging.getLogger(__name__)

_SHOWN_DEFAULT, _SHOWN_MAX = 20, 1_000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The middleware that turns exceptions into answers and blame."""
    try:
        return await handler(request)
    except ClientError as error:
        return web.Response(
            status=error.status,
            body=error.body(),
            content_type="application/json",
            headers=error.headers,
        )
    except web.HTTPException as error:
        answer = error_response(error.status, _explained(request, error))
        answer.headers.update({k: v for k, v in error.headers.items() if k.lower() == "allow"})
        return answer
    except OSError as error:
        log.debug("client of %s left: %r", request.path, error)
        raise
    except Exception:
        # Ours: it stays loud, and the client learns that it is not to blame.
        log.exception("failed to answer %s %s", request.method, request.path)
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

"""Errors for clients, in the form of OpenAI's API."""

from __future__ import annotations

import msgspec
from aiohttp import web

from engine.scheduler.types import Refused

RETRY_AFTER_S = 1
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(Exception):
    """Raised for a request whose answer has another status than 200: it has the status, a message
    for the client, and the faulty field.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, passes: bool = False
    ) -> None:
        """Make the error with status and message; `passes` says that the client may try again at
        this worker.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.passes = passes

    def response(self) -> web.Response:
        """Return the JSON answer.

        `Retry-After` distinguishes a full queue, where another try may succeed, from a worker that
        shuts down.
        """
        return web.Response(
            status=self.status,
            body=error_body(self.status, self.message, self.param),
            content_type="application/json",
            headers={"Retry-After": str(RETRY_AFTER_S)} if self.passes else None,
        )


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return `{"error": {message, type, param, code}}` as JSON."""
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def from_refusal(refusal: Refused) -> ApiError:
    """Return the error of a refused request. After a full queue another try may succeed; all other
    refusals are the request's fault.
    """
    if refusal.reason == "queue_full":
        return ApiError(503, refusal.message, passes=True)
    return ApiError(400, refusal.message, "prompt")

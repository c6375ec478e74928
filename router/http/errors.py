"""Defines the errors that are a client's fault and those that are a worker's, and the bodies that
report them.

A `ClientError` becomes a 4xx reply and never counts against a worker. After a `WorkerError`, the
request may go to another worker, as long as the client has received nothing of the reply. Any other
exception is a defect of the router and must not be hidden.
"""

from __future__ import annotations

import errno
from typing import Literal

import msgspec

# Status -> `error.type`, as OpenAI's API names them (API reference, "Errors", 2024).
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    529: "overloaded_error",  # Anthropic's, and Dynamo's for a full queue
}

WorkerErrorKind = Literal[
    "busy",  # 429, 529, 503 with Retry-After, or all `max_connections` in use: load, not illness
    "out_of_files",  # this router may open no more: its own want, and no worker's fault
    "connect",  # refused, unreachable, or TLS failure
    "timeout_connect",  # not connected within `connect_s`
    "early_close",  # the connection ended before the reply did
    "timeout_send",  # it took nothing of the request's body for `send_s`
    "timeout_first_byte",  # no byte of the reply's body within `first_byte_s`
    "timeout_between",  # the reply stalled for `between_s`
    "transfer_timeout",  # two workers waited in vain for KV to pass between them
    "garbage",  # not HTTP, or a head or framing that can be read in two ways
    "status_5xx",  # 500, 502, 503 or 504
    "no_answer",  # 200 with nothing in it, an error, or an answer that the engine gave up
    "no_model",  # it says that it has not got the model: nor does this
    "absent",  # it lacks the path, which does not concern its health
    "moved",  # the data plane used another worker, for an unknown reason
]


class ClientError(Exception):
    """A fault of the client: it is answered with `status` (400..499) and never retried."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Make an error with this HTTP status. `param` is the path of the faulty field, for example
        `messages[3].role`.
        """
        if not 400 <= status <= 499:
            raise ValueError(f"a client error has a status of 400..499, got {status}")
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """Return the JSON body of the reply."""
        return error_body(self.message, error_type(self.status), self.param, self.code)


class WorkerError(Exception):
    """A fault of a worker: another worker may be tried while the client has received nothing."""

    def __init__(self, kind: WorkerErrorKind, message: str, busy_s: float | None = None) -> None:
        """Make an error of a worker. `busy_s` is explained at `policies.facts.Failure`."""
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.busy_s = busy_s


def out_of_files(error: BaseException | None) -> bool:
    """Return whether the error means that this process or the system has too many open files."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def error_type(status: int) -> str:
    """Return OpenAI's `error.type` for an HTTP status of 400..599."""
    fallback = "invalid_request_error" if status < 500 else "server_error"
    return ERROR_TYPES.get(status, fallback)


def error_body(
    message: str, type: str, param: str | None = None, code: str | int | None = None
) -> bytes:
    """Return JSON in the form that OpenAI's clients read: `{"error": {message, type, param,
    code}}`.
    """
    return msgspec.json.encode(
        {"error": {"message": message, "type": type, "param": param, "code": code}}
    )

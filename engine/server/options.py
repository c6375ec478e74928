"""The options of a request besides its prompt; HTTP headers give the deadline and the tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.block_pool import Retention
from engine.server.errors import ApiError
from engine.wire.kv_transfer import TransferParams

DEADLINE_HEADER = "x-request-timeout-ms"
MAX_TIMEOUT_MS = 86_400_000
MAX_TENANT_CHARS = 1_024
# A router that passes on the remaining time ends the request first, and blames no worker.
GRACE_S = 0.25


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request's limits, priority, tenant, and the use of its KV. Lifetime: request."""

    output_tokens: int  # to give at most
    priority: int = 0
    salt: str | None = None
    timeout_s: float = float("inf")  # from now; then no client waits for the answer
    tenant: str = ""
    retention: Retention | None = None  # the worth of its blocks
    transfer: TransferParams | None = None  # where its KV is, or that another worker wants it


def timeout_s(headers: Mapping[str, str]) -> float:
    """Return the seconds until the deadline in the headers, plus GRACE_S; infinity if they have no
    deadline. Raises ApiError for an invalid deadline.
    """
    text = headers.get(DEADLINE_HEADER)
    if text is None:
        return float("inf")
    is_number = text.isascii() and text.isdecimal() and len(text) <= 12
    if not is_number or int(text) > MAX_TIMEOUT_MS:
        message = f"{DEADLINE_HEADER} must be milliseconds, 0..{MAX_TIMEOUT_MS}; 0: no deadline"
        raise ApiError(400, message, DEADLINE_HEADER)
    return int(text) / 1e3 + GRACE_S if int(text) else float("inf")


def tenant_of(headers: Mapping[str, str], name: str) -> str:
    """Return the tenant that the header `name` has; "" if there is no such header. Raises ApiError
    for an invalid tenant.
    """
    tenant = headers.get(name, "")
    if len(tenant) > MAX_TENANT_CHARS:
        raise ApiError(400, f"{name} must have at most {MAX_TENANT_CHARS} characters", name)
    return tenant

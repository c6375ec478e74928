"""How long a request may take: its client's deadline, and what is left of it for a worker.

The deadline comes in a header of a name of its own or in the one that Envoy sets for the services
behind it (`x-envoy-expected-rq-timeout-ms`: Envoy 1.31, "Router", HTTP headers to upstreams).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from router.record.request_record import DEADLINE
from router.request.errors import ClientError, error_body, error_type
from router.upstream.client_reply import ClientReply
from router.upstream.reply import Outcome, Timeouts, UpstreamRequest

ENVOY_HEADER = "x-envoy-expected-rq-timeout-ms"
CODE = DEADLINE
_MOST_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Patience:
    """Lifetime: process, replaced on reload."""

    deadline_header: str = "x-request-timeout-ms"
    ms_per_token: float = 0.0  # added to the wait for a first byte, per uncached prompt token
    whole_answer_s: float = 600.0  # the same wait where an answer does not stream
    total_s: float = 0.0  # for any request, whatever its client says; 0: no bound

    def deadline_s(self, header: Callable[[str], str | None], now_s: float) -> float | None:
        """When nobody wants the answer any more; None: whenever. Raises ClientError."""
        left_s = [
            _seconds(name, text)
            for name in (self.deadline_header, ENVOY_HEADER)
            if (text := header(name)) is not None
        ]
        known_s = [one_s for one_s in (*left_s, self.total_s) if one_s]
        return now_s + min(known_s) if known_s else None

    def timeouts(self, timeouts: Timeouts, stream: bool, uncached_tokens: int) -> Timeouts:
        """The bounds of one attempt, the prompt's length considered."""
        first_s = timeouts.first_byte_s if stream else self.whole_answer_s
        if first_s == timeouts.first_byte_s and not self.ms_per_token:
            return timeouts
        return replace(timeouts, first_byte_s=first_s + uncached_tokens * self.ms_per_token / 1e3)

    def passed_on(self, request: UpstreamRequest, left_s: float) -> UpstreamRequest:
        """The request with what is left of the time in the place of what there was."""
        name = self.deadline_header.encode()
        ours = (name, ENVOY_HEADER.encode())
        headers = tuple(h for h in request.headers if h[0].lower() not in ours)
        told = (name, b"%d" % max(int(left_s * 1e3), 1))
        return replace(request, headers=headers, internal_headers=(*request.internal_headers, told))


async def in_time(
    sending: Coroutine[Any, Any, Outcome],
    reply: ClientReply,
    deadline_s: float,
    clock: Callable[[], float],
) -> Outcome:
    """What became of an attempt; one that is not over by its deadline is cancelled.

    An answer that has begun by then is cut off, so that it cannot look whole.
    """
    started_s = clock()
    try:
        async with asyncio.timeout(deadline_s - started_s):
            return await sending
    except TimeoutError:
        begun_bytes = reply.body_length
        if begun_bytes:
            reply.abort()
        error = ClientError(408, "the request's deadline has passed", code=CODE)
        return Outcome(started_s=started_s, error=error, bytes_to_client=begun_bytes)


def ran_out(outcome: Outcome) -> bool:
    """Whether the deadline ended an attempt."""
    return isinstance(outcome.error, ClientError) and outcome.error.code == CODE


def late_answer(reply: ClientReply) -> web.StreamResponse:
    """The answer to a client whose deadline has passed: `reply` where that has begun."""
    if reply.body_length:
        return reply
    message = "the request's deadline passed before an answer began"
    body = error_body(message, error_type(504), code=CODE)
    return web.Response(status=504, body=body, content_type="application/json")


def _seconds(name: str, text: str) -> float:
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and int(text) <= _MOST_MS):
        raise ClientError(400, f"{name} must be milliseconds, 0..{_MOST_MS}; 0: no deadline", name)
    return int(text) / 1e3

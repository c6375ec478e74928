"""Reads the deadlines of requests from headers, and sets the time limits of attempts.

A client sets a deadline in the configured header, or in the header that Envoy sets for the services
behind it (`x-envoy-expected-rq-timeout-ms`: Envoy 1.31, "Router", HTTP headers to upstreams).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from router.http.errors import ClientError
from router.http.messages import Answer, error_response
from router.http.reply import Header, Outcome, ReplySink, Timeouts
from router.record.request_record import DEADLINE
from router.upstream.client_reply import Reply

ENVOY_HEADER = "x-envoy-expected-rq-timeout-ms"
_MAX_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The configured time limits for a request. Lifetime: process, replaced on reload."""

    deadline_header: str = "x-request-timeout-ms"
    ms_per_token: float = 0.0  # added to the wait for a first byte, per uncached prompt token
    whole_answer_s: float = 600.0  # the same wait where an answer does not stream
    total_s: float = 0.0  # for any request, even without a client's deadline; 0: no limit

    def deadline_s(self, header: Callable[[str], str | None], now_s: float) -> float | None:
        """Return the request's deadline, in seconds on the clock of `now_s`; None if it has none.

        `header` returns the value of the request's header with a given name. Raises
        ClientError(400) if the value is not a valid number of milliseconds.
        """
        own, envoys = header(self.deadline_header), header(ENVOY_HEADER)
        if own is None and envoys is None and not self.total_s:
            return None
        given = ((self.deadline_header, own), (ENVOY_HEADER, envoys))
        left_s = [_seconds(name, text) for name, text in given if text is not None]
        known_s = [one_s for one_s in (*left_s, self.total_s) if one_s]
        return now_s + min(known_s) if known_s else None

    def timeouts(self, timeouts: Timeouts, stream: bool, uncached_tokens: int) -> Timeouts:
        """Return the timeouts of one attempt, made from the general `timeouts`.

        The time limit for the first byte grows with the number of uncached prompt tokens. It starts
        from another value if the answer is not a stream.
        """
        first_s = timeouts.first_byte_s if stream else self.whole_answer_s
        if first_s == timeouts.first_byte_s and not self.ms_per_token:
            return timeouts
        return replace(timeouts, first_byte_s=first_s + uncached_tokens * self.ms_per_token / 1e3)

    def names(self) -> frozenset[bytes]:
        """Return the lower-case names of the request headers that may carry a deadline."""
        return frozenset((self.deadline_header.encode(), ENVOY_HEADER.encode()))

    def left(self, left_s: float) -> Header:
        """Return the header that tells a worker how many milliseconds the request has left;
        `left_s` is the same time in seconds.
        """
        return self.deadline_header.encode(), b"%d" % max(int(left_s * 1e3), 1)


async def in_time(
    sending: Coroutine[Any, Any, Outcome],
    reply: Reply,
    deadline_s: float,
    clock: Callable[[], float],
    sink: ReplySink | None = None,
) -> Outcome:
    """Wait for the end of `sending`, at most until the deadline, and return the outcome.

    If the deadline passes while an answer is being sent, the answer is broken off visibly, so that
    the client cannot take it for complete. `sink` is the filter between the worker and `reply`, or
    None.
    """
    started_s = clock()
    try:
        async with asyncio.timeout(deadline_s - started_s):
            return await sending
    except TimeoutError:
        begun_bytes = reply.body_length if reply.begun else 0
        if begun_bytes:
            (sink or reply).abort(late=True)
        error = ClientError(408, "the request's deadline has passed", code=DEADLINE)
        return Outcome(started_s=started_s, error=error, bytes_to_client=begun_bytes)


def is_late(outcome: Outcome) -> bool:
    """Return True if an attempt ended because the request's deadline passed."""
    return isinstance(outcome.error, ClientError) and outcome.error.code == DEADLINE


def late_answer(reply: Reply) -> Answer:
    """Return the answer for a client whose deadline has passed: `reply` if the client already has a
    part of it, otherwise an error with status 504.
    """
    if reply.begun:
        return reply
    message = "the request's deadline passed before an answer began"
    return error_response(504, message, DEADLINE)


def _seconds(name: str, text: str) -> float:
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and int(text) <= _MAX_MS):
        raise ClientError(400, f"{name} must be milliseconds, 0..{_MAX_MS}; 0: no deadline", name)
    return int(text) / 1e3

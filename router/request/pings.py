"""Writes comments into the streams of requests that wait for long, in the router or at their
worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from router.http.messages import Answer, Response
from router.http.reply import PassingSink
from router.request.state import RequestState
from router.upstream.client_reply import ClientReply
from router.upstream.edited_reply import Editor
from router.upstream.kept_open_reply import KeptOpenReply

_NAMED_EVENTS = frozenset({"messages", "responses"})  # formats whose events have names
_STREAMS = _NAMED_EVENTS | {"openai"}


class Pings:
    """Writes comments at intervals to the client of a stream that waits. Lifetime: process.

    Proxies and clients close connections on which nothing is sent for a while. The first comment
    fixes the status 200, so it is sent late.
    """

    def __init__(self, every_s: Callable[[], float], buffer_bytes: Callable[[], int]) -> None:
        """Prepare to write comments. `every_s` returns the seconds before a comment, or 0 for no
        comments. `buffer_bytes` returns the limit that `ClientReply` uses.
        """
        self._every_s = every_s
        self._buffer_bytes = buffer_bytes

    @contextmanager
    def during(self, state: RequestState) -> Iterator[None]:
        """Write comments to the client until this context is left, if the request is a stream that
        may have comments.

        After the first comment, the request's `kept_open` is the reply.
        """
        every_s = self._every_s()
        if not every_s or not can_ping(state) or (state.stream and state.stream.begun):
            yield
            return
        task = asyncio.create_task(self._continue(state, every_s))
        try:
            yield
        finally:
            task.cancel()

    async def _continue(self, state: RequestState, every_s: float) -> NoReturn:
        while True:
            await asyncio.sleep(every_s)
            ping(state, self._buffer_bytes())


def can_ping(state: RequestState) -> bool:
    """Return True if the client of this request may get comments before its answer."""
    return state.arrival.stream and state.path.reads in _STREAMS and state.carrier.moves


def ping(state: RequestState, buffer_bytes: int) -> None:
    """Write a comment to the client, and before the first one the head of the answer.
    `buffer_bytes` is the same as for `ClientReply`.
    """
    if state.kept_open is None:
        named = state.path.reads in _NAMED_EVENTS
        headers = state.account.headers()
        state.kept_open = KeptOpenReply(state.http, buffer_bytes, headers, named)
    state.kept_open.ping()


class PatientReply(PassingSink):
    """A client's reply in one attempt, which becomes the request's `kept_open` at the first
    comment. Lifetime: one attempt.

    Until then it is a plain reply: an answer that begins before the first comment is not changed by
    it.
    """

    by_fallback = "pinged"

    def __init__(
        self, state: RequestState, plain: ClientReply, editor: Editor | None, buffer_bytes: int
    ) -> None:
        """Make the reply. `plain` is the reply without comments. `editor` changes the body; None
        leaves it unchanged. `buffer_bytes` is the same as for `ClientReply`.
        """
        self._state = state
        self._plain = plain
        self._editor = editor
        self._buffer_bytes = buffer_bytes
        self._follows = False  # `kept_open` takes this attempt's answer

    @property
    def _reply(self) -> ClientReply:
        kept = self._state.kept_open
        if kept is None:
            return self._plain
        if not self._follows:
            self._follows = True
            kept.follow(self._editor)
        return kept

    def ping(self) -> None:
        """Write a comment to the client, if the answer has not begun."""
        if not self._reply.begun:
            ping(self._state, self._buffer_bytes)

    @property
    def status(self) -> int:
        return self._reply.status

    @property
    def keep_alive(self) -> bool:
        return self._reply.keep_alive

    @property
    def body_length(self) -> int:
        return self._reply.body_length

    @property
    def begun(self) -> bool:
        return self._reply.begun


def as_event(reply: KeptOpenReply, answer: Answer) -> Answer:
    """Return the answer for a client that has received comments in `reply`. An answer that the
    router itself made becomes an event.
    """
    if not isinstance(answer, Response):
        return answer
    reply.fail(answer.body)
    return reply

"""Comments in the streams of requests that wait at the router for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from router.http.messages import Answer, Response
from router.request.state import RequestState
from router.upstream.kept_open_reply import KeptOpenReply

_NAMED = frozenset({"messages", "responses"})  # how paths are read whose events have names
_STREAMS = _NAMED | {"openai"}


class Pings:
    """Writes a comment now and then to the client of a stream that waits. Lifetime: process.

    Proxies and clients end connections on which nothing comes for a while. The first comment
    commits the status 200, so that it comes late.
    """

    def __init__(self, every_s: Callable[[], float], buffer_bytes: Callable[[], int]) -> None:
        """`every_s`: returns the seconds before a comment; 0: there are none.

        buffer_bytes: as of `ClientReply`.
        """
        self._every_s = every_s
        self._buffer_bytes = buffer_bytes

    @contextmanager
    def during(self, state: RequestState) -> Iterator[None]:
        """Write comments until this context is left, if the request is a stream that can have any.

        The request's `kept_open` has the reply from the first comment on.
        """
        every_s = self._every_s()
        streams = state.arrival.stream and state.path.reads in _STREAMS and state.carrier.moves
        if not every_s or not streams or (state.stream is not None and state.stream.begun):
            yield
            return
        task = asyncio.create_task(self._go_on(state, every_s))
        try:
            yield
        finally:
            task.cancel()

    async def _go_on(self, state: RequestState, every_s: float) -> NoReturn:
        while True:
            await asyncio.sleep(every_s)
            self._ping(state)

    def _ping(self, state: RequestState) -> None:
        if state.kept_open is None:
            named, room = state.path.reads in _NAMED, self._buffer_bytes()
            state.kept_open = KeptOpenReply(state.http, room, state.account.headers(), named)
        state.kept_open.ping()


def as_event(reply: KeptOpenReply, answer: Answer) -> Answer:
    """Return the answer for a client that got comments in `reply` before it.

    An answer of the router's own becomes an event.
    """
    if not isinstance(answer, Response):
        return answer
    reply.fail(answer.body)
    return reply

"""Asks an engine for its version, once for all callers that need it at the same time.

The engine behind a URL can be replaced between two health probes, so a caller that must be sure
asks at the last moment. Only an answer to a question that began after the call counts. Callers that
arrive while a question is in flight therefore share the next question.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from engine.wire.events import WireError
from router.engines.adapter import NO_VERSION, EngineReply, EngineVersion
from router.engines.version import version_in
from router.http.errors import WorkerError
from router.http.reply import Sends, Timeouts, UpstreamRequest
from router.upstream.collected_reply import CollectedReply

_ANSWER_BYTES = 1 << 20
_GONE = frozenset({"connect", "early_close", "garbage"})  # kinds of errors: not the same process
_TRIES = 2  # a kept connection may have ended with the process before
_QUIET_S = 3.0  # without another question, after one that got no answer in time
_OK, _NOT_FOUND = 200, 404
# "other": it reports another version, or is gone. "unknown": it did not answer in time.
Told = Literal["same", "other", "unknown"]
Ask = Callable[[], Awaitable[EngineReply]]


async def get_by_relay(upstream: Sends, path: str, limit_s: float) -> EngineReply:
    """Return the answer to GET `path`, sent through the relay that carries requests.

    Raises TimeoutError, or WireError if the connection failed or the answer is malformed.
    """
    collected = CollectedReply(_ANSWER_BYTES)
    timeouts = Timeouts(limit_s, limit_s, limit_s, limit_s, limit_s)
    outcome = await upstream.send(UpstreamRequest("GET", path), collected, timeouts)
    if (error := outcome.error) is not None:
        if isinstance(error, WorkerError) and error.kind in _GONE:
            raise WireError(error.message)
        raise TimeoutError
    assert outcome.status is not None, "it answered"
    return EngineReply(outcome.status, collected.body)


class EngineQuestion:
    """The question for one engine's version.

    An engine that did not answer in time is not asked for a while, so that it does not delay each
    request. Lifetime: worker.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until_s = float("-inf")
        self._asking: asyncio.Task[EngineVersion | None] | None = None
        self._next: asyncio.Task[EngineVersion | None] | None = None

    async def put(self, fetch: Ask, known: EngineVersion) -> Told:
        """Call `fetch` for the engine's version, and return "same" if it is still `known`, "other"
        if it is not, or "unknown" without an answer. An engine that has no version is not asked and
        counts as "same".
        """
        if not known.path:
            return "same"
        if self._clock() < self._quiet_until_s:
            return "unknown"
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._asking, fetch, known.path))
        told = await asyncio.shield(self._next)
        if told is None:
            return "unknown"
        return "same" if told == known else "other"

    async def _after(
        self, before: asyncio.Task[EngineVersion | None] | None, fetch: Ask, path: str
    ) -> EngineVersion | None:
        """Wait until the previous question has ended, then ask for the version. Return None if no
        answer came in time.
        """
        if before is not None:
            await asyncio.wait((before,))
        self._asking, self._next = self._next, None
        if self._clock() < self._quiet_until_s:  # since the question before
            return None
        for _ in range(_TRIES):
            try:
                status, body = await fetch()
            except TimeoutError:
                self._quiet_until_s = self._clock() + _QUIET_S
                return None
            except WireError:
                continue
            if status == _OK:
                return version_in(body, path)
            return NO_VERSION if status == _NOT_FOUND else None
        return NO_VERSION

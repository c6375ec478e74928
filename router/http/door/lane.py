"""A connection's plain requests to hot paths, served by the door itself, one after the other.

No HTTP server stands behind such a connection: its protocol, parser, request and response objects
cost as much as all that routing does. The first request that is not hot goes to the server, with
all that follows, for good: nobody ever takes a connection back from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time

from kvkernels import PlainHead
from router.http.answers import Answering
from router.http.client_reply import ClientReply
from router.http.door.refusals import NO_SNIFFING
from router.http.door.requests import Whole

log = logging.getLogger(__name__)

# Handlers by path, for requests that the door may serve itself.
HOT: web.AppKey[Mapping[str, Answering]] = web.AppKey("hot", dict)

_WAITING = 16  # requests that came before an earlier one was answered: no more are read
_WAITING_BYTES = 1 << 20


class Connection(Protocol):
    """What a lane needs of the connection that it serves."""

    @property
    def transport(self) -> asyncio.Transport: ...
    @property
    def host(self) -> str: ...
    @property
    def closing(self) -> bool: ...  # each request is the last one
    def hand_over(self, requests: list[Whole]) -> None:
        """Give these, and all that comes, to the server behind."""

    def became_idle(self) -> None:
        """All that came was answered."""


class HotRequest:
    """A plain request as its handler sees it: a `ClientRequest`. Lifetime: request."""

    __slots__ = ("_body", "_lane", "headers", "output_size", "path", "raw_path", "whole")

    method = "POST"
    version = HttpVersion11

    def __init__(self, lane: Lane, whole: Whole, headers: PlainHead, path: str) -> None:
        self._lane = lane
        self._body = whole.body
        self.headers = headers
        self.raw_path = whole.head.target
        self.path = path
        self.output_size = 0  # bytes of the answer, written so far
        self.whole = False  # the answer is

    @property
    def raw_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return self.headers.fields()

    @property
    def remote(self) -> str | None:
        return self._lane.connection.host or None

    @property
    def keep_alive(self) -> bool:
        return self._lane.goes_on

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._lane.transport

    @property
    def protocol(self) -> Lane:
        return self._lane

    @property
    def writer(self) -> HotRequest:
        return self

    async def drain(self) -> None:
        """Wait until the client has read. Raises ConnectionError when it is gone."""
        await self._lane.drained()

    async def read(self) -> bytes:
        """The whole body."""
        return self._body


class Lane:
    """Lifetime: connection, until the server behind gets it."""

    __slots__ = (
        *("_drained", "_held_up", "_hot", "_last", "_leaving", "_waiting", "_waiting_bytes"),
        *("connection", "task", "transport", "writing_paused"),
    )

    def __init__(self, connection: Connection, hot: Mapping[str, Answering]) -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = connection.transport  # None: the client is gone
        self.task: asyncio.Task[None] | None = None  # of the request that is being answered
        self.writing_paused = False
        self._hot = hot
        self._waiting: deque[Whole] = deque()
        self._waiting_bytes = 0
        self._held_up = False  # no more is read until these are dealt with
        self._last = False  # the request that is being answered is the connection's last one
        self._leaving = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Nothing is being answered."""
        return self.task is None

    @property
    def goes_on(self) -> bool:
        """The connection outlives the request that is being answered."""
        return self.transport is not None and not (self._last or self._leaving)

    def take(self, requests: list[Whole]) -> None:
        """Answer these after those that came before."""
        if self.transport is None or self.transport.is_closing():
            return
        self._waiting.extend(requests)
        if self.task is None:
            self._next()
        else:
            self._waiting_bytes += sum(len(whole.body) for whole in requests)
            full = len(self._waiting) > _WAITING or self._waiting_bytes > _WAITING_BYTES
            if full and not self._held_up:
                self._held_up = True
                self.transport.pause_reading()

    def pause(self) -> None:
        """The client reads more slowly than we write."""
        self.writing_paused = True

    def resume(self) -> None:
        """It has read."""
        self.writing_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drained(self) -> None:
        """Wait until the client has read. Raises ConnectionError when it is gone."""
        if self.transport is None:
            raise ConnectionResetError("the client is gone")
        if self.writing_paused:
            if self._drained is None or self._drained.done():
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)

    def leave(self) -> asyncio.Task[None] | None:
        """Serve no more after the request that is being answered, whose task is returned."""
        self._leaving = True
        if self.task is None and self.transport is not None:
            self.transport.close()
        return self.task

    def lost(self) -> None:
        """The client is gone; what is being answered ends."""
        self.transport = None
        self._waiting.clear()
        if self.task is not None:
            self.task.cancel()

    def _next(self) -> None:
        """Begin with the next request, or hand over, or wait for one."""
        if not self._waiting:
            self.connection.became_idle()
            return
        whole = self._waiting.popleft()
        head = whole.head
        path = head.target.partition("?")[0]
        answering = self._hot.get(path) if head.method == "POST" else None
        if answering is None or head.plain is None:
            self._hand_over([whole, *self._waiting])
            return
        self._last = head.last or self.connection.closing
        request = HotRequest(self, whole, head.plain, path)
        self.task = asyncio.get_running_loop().create_task(self._answer(request, answering))

    def _hand_over(self, requests: list[Whole]) -> None:
        self._waiting.clear()
        self._read_on()
        self.transport = None
        self.connection.hand_over(requests)

    async def _answer(self, request: HotRequest, answering: Answering) -> None:
        goes_on = False
        try:
            goes_on = self._give(request, await answering(request))
        except OSError as error:
            log.debug("a client left: %r", error)
        except Exception:
            log.exception("failed to answer %s", request.path)
        finally:
            self.task = None
            if not goes_on:
                self._end(request)
        if goes_on:
            self._next()
            self._read_on()

    def _give(self, request: HotRequest, answer: web.StreamResponse) -> bool:
        """Write what was not relayed; whether the connection goes on."""
        if isinstance(answer, ClientReply):  # the relay has written it
            request.whole = True
            return bool(answer.keep_alive) and self.goes_on
        assert isinstance(answer, web.Response), "an answer is relayed, or ours and whole"
        if self.transport is None:
            return False
        if request.output_size:  # another answer has begun
            return False
        goes_on = self.goes_on and answer.keep_alive is not False
        self.transport.write(_text(answer, goes_on))
        return goes_on

    def _end(self, request: HotRequest) -> None:
        """The connection ends; what was not relayed to its end must not look whole."""
        if self.transport is None:
            return
        if request.output_size and not request.whole:
            self.transport.abort()
        else:
            self.transport.close()

    def _read_on(self) -> None:
        """Read what comes, once what had come before is dealt with."""
        if self._waiting:
            return
        self._waiting_bytes = 0
        transport = self.transport
        if self._held_up and transport is not None and not transport.is_closing():
            self._held_up = False
            transport.resume_reading()


def _text(answer: web.Response, goes_on: bool) -> bytes:
    """An answer that is no worker's, as HTTP."""
    body = answer.body or b""
    assert isinstance(body, bytes), "an answer of ours is whole"
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if "Content-Type" not in answer.headers:
        lines.append("Content-Type: application/octet-stream")
    lines += [f"Content-Length: {len(body)}", f"Date: {rfc822_formatted_time()}"]
    lines.append(": ".join(NO_SNIFFING))
    if not goes_on:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

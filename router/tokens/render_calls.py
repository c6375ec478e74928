"""Asks renderers for token ids, with limits on the time, number and length of the calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from engine.wire.events import WireError
from router.engines.adapter import fetch
from router.engines.render_way import NotRenderedError, Post, Rendered, RenderWay

RESULTS = ("rendered", "refused", "late", "failed", "busy")

_ANSWER_BYTES, _ANSWER_BYTES_MAX = 1 << 20, 64 << 20
_ANSWER_SHARE = 16  # bytes of the answer for one of the request: a number and a comma per byte
_LONG_BODY_BYTES = 1 << 20  # has the whole time; a short one 0.3 of it
_SHORT_SHARE = 0.3
_BESIDE_SHARE = 10.0
# The share of all calls at a time that calls with media may take, and that calls for which no
# request waits may take.
_MEDIA_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class RenderTerms:
    """The limits of calls to renderers. Lifetime: process, replaced on reload."""

    urls: tuple[str, ...]  # of renderers that are no workers
    workers: bool  # workers may be asked, too
    every_s: float  # between two looks for workers that joined
    probe_s: float  # time of a probe
    recheck_s: float  # until a renderer that refused is asked again
    timeout_s: float  # a request waits so long at most, all in all
    calls: int  # that run at a time


class RenderRefusedError(Exception):
    """Raised when a renderer answers that it does not render this request; it carries the HTTP
    status of the answer.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class RenderCalls:
    """Makes the calls to renderers, and counts them by result. Lifetime: process."""

    def __init__(self, http: aiohttp.ClientSession, terms: Callable[[], RenderTerms]) -> None:
        self._http = http
        self._terms = terms
        self._running: Counter[str] = Counter()  # by purpose
        self.results: Counter[str] = Counter()

    async def call(
        self, url: str, way: RenderWay, path: str, body: bytes, media: bool, waited_for: bool
    ) -> Sequence[Rendered] | None:
        """Return each prompt of a request as the renderer at `url` makes it; None if too many calls
        are running.

        `waited_for` is False if no request waits for the answer. A call takes at most `timeout_s`,
        less for short bodies, and ten times as long if no request waits. Raises NotRenderedError,
        RenderRefusedError, TimeoutError, and other errors of a call: aiohttp.ClientError, OSError,
        WireError.
        """
        terms = self._terms()
        use = "media" if media else "waiting" if waited_for else "beside"
        most = terms.calls if use == "waiting" else terms.calls * _MEDIA_SHARE
        if self._running.total() >= terms.calls or self._running[use] >= most:
            self.results["busy"] += 1
            return None
        share = min(1.0, _SHORT_SHARE + (1 - _SHORT_SHARE) * len(body) / _LONG_BODY_BYTES)
        share = _BESIDE_SHARE if not waited_for else 1.0 if media else share
        self._running[use] += 1
        try:
            async with asyncio.timeout(terms.timeout_s * share):
                rendered = await way.render(self.post(url, len(body)), path, body)
        except (NotRenderedError, RenderRefusedError):
            self.results["refused"] += 1
            raise
        except TimeoutError:
            self.results["late"] += 1
            raise
        except (aiohttp.ClientError, OSError, WireError):
            self.results["failed"] += 1
            raise
        finally:
            self._running[use] -= 1
        self.results["rendered"] += 1
        return rendered

    def post(self, url: str, body_bytes: int) -> Post:
        """Return the function that sends a POST to the renderer at `url`.

        `body_bytes` is the length of the request whose token ids are wanted; it limits the length
        of the answers.
        """
        limit = min(_ANSWER_BYTES + _ANSWER_SHARE * body_bytes, _ANSWER_BYTES_MAX)
        timeout = aiohttp.ClientTimeout(total=None)  # the caller's bounds all

        async def post(path: str, data: bytes) -> bytes:
            reply = await fetch(self._http, f"{url}{path}", timeout, limit, "POST", data)
            if reply.status == 200:
                return reply.body
            if reply.status >= 500 or reply.status == 429:
                raise WireError(f"POST {path} answered {reply.status}")
            raise RenderRefusedError(reply.status)

        return post

"""Frees the KV that a prefill worker keeps for a decode leg, if no decode leg will read it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from router.body.legs import RELEASE, Leg
from router.fleet.member import Member
from router.http.reply import Sends, Timeouts, UpstreamRequest
from router.request.pair_check import group_of
from router.upstream.collected_reply import CollectedReply

_ANSWER_BYTES = 1 << 16  # longest answer to a release, bytes
_RELEASES_AT_ONCE = 32  # concurrent releases at one worker
_MAX_RELEASES = 16_384  # of one worker; the KV of more is kept as long as its worker keeps it
_RELEASE_S = 30.0  # of a call; after so long a lease of our engine ends by itself


class Releases:
    """Asks workers to free KV that no decode leg will read, with a few calls at a time.

    If such a call fails, the worker frees the KV itself when its own time limit is over.
    Lifetime: process.
    """

    def __init__(self) -> None:
        self._waiting: dict[Sends, deque[tuple[Leg, Timeouts]]] = {}  # by worker
        self._tasks: dict[Sends, set[asyncio.Task[None] | None]] = {}

    def add(self, upstream: Sends, leg: Leg, timeouts: Timeouts) -> None:
        """Queue a call that asks a worker to free KV; `leg` is the body of the call."""
        waiting = self._waiting.setdefault(upstream, deque(maxlen=_MAX_RELEASES))
        waiting.append((leg, replace(timeouts, first_byte_s=_RELEASE_S)))
        tasks = self._tasks.setdefault(upstream, set())
        if len(tasks) < _RELEASES_AT_ONCE:
            tasks.add(asyncio.create_task(self._send(upstream, waiting)))

    async def _send(self, upstream: Sends, waiting: deque[tuple[Leg, Timeouts]]) -> None:
        try:
            while waiting:
                leg, timeouts = waiting.popleft()
                headers = ((b"Content-Type", b"application/json"),)
                sent = UpstreamRequest("POST", RELEASE, headers, leg.body)
                await upstream.send(sent, CollectedReply(_ANSWER_BYTES), timeouts)
        finally:  # in the turn that found nothing more: the next release gets a task of its own
            self._tasks[upstream].discard(asyncio.current_task())
            if not self._tasks[upstream]:
                del self._tasks[upstream], self._waiting[upstream]


class KeptKv:
    """The KV that the prefill leg of one request left at its worker, for the decode leg. Lifetime:
    request.

    This is a context manager. Its exit asks the worker to free the KV, unless a decode leg has read
    it.
    """

    __slots__ = (
        *("_release", "_releases", "_timeouts", "_upstream", "group", "prefiller", "second_leg"),
    )

    def __init__(self, releases: Releases) -> None:
        # Makes the second leg from the client's body; None: no first leg has ended well.
        self.second_leg: Callable[[bytes], Leg] | None = None
        self._release: Leg | None = None  # None: the worker keeps no KV, or frees it by itself
        self.prefiller: Member  # that the first leg was sent to, and its group then
        self.group: str | None
        self._upstream: Sends
        self._timeouts: Timeouts
        self._releases = releases

    def sent(self, member: Member, unread: Leg | None, timeouts: Timeouts) -> None:
        """Note that a prefill leg was sent to `member`, and free the KV of an earlier one.

        `unread` is the call that frees the KV if the leg's answer never arrives, or None.
        """
        self.second_leg = None
        self._give_back()
        self._upstream, self._timeouts = member.upstream, timeouts
        self.prefiller, self.group = member, group_of(member)
        self._release = unread

    def kept(self, second_leg: Callable[[bytes], Leg], release: Leg | None) -> None:
        """Note that the prefill leg left KV at the worker.

        `second_leg` makes the decode leg from the client's body. `release` is the call that frees
        the KV, or None if none is needed.
        """
        self.second_leg, self._release = second_leg, release

    def failed(self, *, may_be_kept: bool) -> None:
        """Note that no decode leg will read the KV. If `may_be_kept`, the worker may still hold the
        KV, and is asked to free it.
        """
        self.second_leg = None
        if not may_be_kept:
            self._release = None
        self._give_back()

    def read(self) -> None:
        """Note that the decode leg has begun to answer, so that it has read the KV. The router need
        not ask the worker to free it any more.
        """
        self._release = None

    def __enter__(self) -> KeptKv:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            self._releases.add(self._upstream, release, self._timeouts)

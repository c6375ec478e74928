"""Tests of releasing KV that no request will read: each worker gets every release call, a few calls
at a time.
"""

from __future__ import annotations

import asyncio
import json

from router.body.legs import Leg
from router.http.reply import Outcome, Timeouts
from router.request.kept_kv import Releases
from tests.router.waiting import until


class Upstream:
    """Stands in for the connection pool that sends calls to one worker. Lifetime: test."""

    def __init__(self, answers: bool = True) -> None:
        self.told: list[int] = []
        self.under_way = self.most = 0
        self._answers = answers

    async def send(self, request, sink, timeouts, *_) -> Outcome:  # type: ignore[no-untyped-def]
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await (asyncio.sleep(0) if self._answers else asyncio.Event().wait())
        self.under_way -= 1
        self.told.append(json.loads(request.body)["n"])
        return Outcome(started_s=0.0, status=200)

    def abandon_silent(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def test_all_release_calls_are_sent_although_another_worker_hangs() -> None:
    releases, hangs, works = Releases(), Upstream(answers=False), Upstream()
    for number in range(2_000):
        for one in (hangs, works):
            releases.add(one, Leg(b'{"n":%d}' % number), Timeouts())
        if number == 1_000:
            await until(lambda: len(works.told) > 1_000, "the first half")
    await until(lambda: len(works.told) == 2_000, "all of them")
    assert works.told == list(range(2_000))
    assert works.most == hangs.most == 32
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()

"""What a feed cannot have of its engine any more, had of a peer instead: a copy, proven."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from policies.facts import Fact, KvCopied
from router.core.workers import WorkerTable
from router.replicas.kv_borrower import Borrowed
from router.replicas.kv_fan import KvFan

log = logging.getLogger(__name__)

_LINK_S = 1.0  # for the link to come up, once
_COPY_S = 10.0  # for a copy; live batches are kept meanwhile
_CATCH_UP_S = 0.25  # for our own events to come as far as the peer's had
_LOOK_S = 0.01
_TRIES = 3  # a copy that ends before the first batch that came to us is proven by none


class Borrowing:
    """Lifetime: process; `tell` hands the core a fact."""

    def __init__(
        self,
        fan: KvFan,
        workers: WorkerTable,
        tell: Callable[[Fact], None],
        clock: Callable[[], float],
    ) -> None:
        self._fan, self._workers, self._tell, self._clock = fan, workers, tell, clock
        self._is_new = True  # the link may not be up only because it was not tried yet

    async def borrow(self, worker_id: int, live_seq: Callable[[], int]) -> bool:
        """Tell the core what a peer knows of this worker; False: nobody knows it, or it is not
        proven. `live_seq`: number of the latest batch that came to us live, -1 without any.
        """
        await self._linked()
        for _ in range(_TRIES):
            worker = self._workers.get(worker_id)
            if worker is None or not self._fan.connected or worker.kv.exact:
                return False
            copy = await self._copy(worker.facts.name)
            if copy is None:
                return False
            await self._until(partial(_is_past, live_seq, copy.next_seq - 1), _CATCH_UP_S)
            if self._take(worker_id, copy):
                return True
        return False

    async def _linked(self) -> None:
        if self._is_new:
            await self._until(lambda: self._fan.connected, _LINK_S)
            self._is_new = False

    async def _copy(self, name: str) -> Borrowed | None:
        answer: asyncio.Future[Borrowed | None] = asyncio.get_running_loop().create_future()

        def done(copy: Borrowed | None) -> None:
            if not answer.done():
                answer.set_result(copy)

        wish = self._fan.borrower.want(name, done)
        try:
            async with asyncio.timeout(_COPY_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._fan.borrower.drop(wish)

    @staticmethod
    async def _until(reached: Callable[[], bool], most_s: float) -> None:
        for _ in range(round(most_s / _LOOK_S)):
            if reached():
                return
            await asyncio.sleep(_LOOK_S)

    def _take(self, worker_id: int, copy: Borrowed) -> bool:
        worker = self._workers.get(worker_id)
        if worker is None or not worker.kv.goes_on_from(copy.next_seq, copy.digest):
            return False
        refused = worker.kv.counters.refused_copies
        # Whatever came before `next_seq` came live to that peer, or might have: a lower number
        # from now on, unless it waits here, tells of another life of the publisher.
        where = copy.next_seq, copy.next_seq - 1, copy.digest
        how = copy.exact, copy.turned_over
        self._tell(KvCopied(self._clock(), worker_id, *where, *how, copy.blocks))
        if worker.kv.counters.refused_copies > refused:
            return False
        self._fan.borrowed += 1
        log.info("worker %d: its cache as of batch %d is a peer's", worker_id, copy.next_seq - 1)
        return True


def _is_past(live_seq: Callable[[], int], seq: int) -> bool:
    return live_seq() >= seq

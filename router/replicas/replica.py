"""This router as one of several: its exchange, its link, and what must agree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from policies.facts import Fact
from router.core.core import RouterCore
from router.core.workers.snapshot import FrozenCache
from router.keys.quota import SharedUse
from router.redis.url import parse_redis_url
from router.replicas.membership import new_identity, terms_of
from router.replicas.messages import VERSION
from router.replicas.settings import ReplicaTerms

if TYPE_CHECKING:
    from router.replicas.kv_events import Borrowing, Claim
    from router.replicas.link import Link
    from router.replicas.sharing import Sharing


class Replica:
    """This router as one of several. Lifetime: process.

    `agree`, `start` and `aclose` once each, in this order. Without `terms.url` all of it
    does nothing.
    """

    def __init__(
        self,
        terms: ReplicaTerms,
        core: RouterCore,
        tell: Callable[[Fact], None],
        uses: SharedUse | None,
    ) -> None:
        """`tell` hands the core a fact; `uses`: of API keys, where there are any."""
        self.sharing: Sharing | None = None
        self.link: Link | None = None
        self.borrowing: Borrowing | None = None
        self._reading: asyncio.Task[None] | None = None
        if terms.url is not None:
            # Imported here: with Redis' client, a tenth of the start that one router does without.
            from router.replicas.kv_events import Borrowing
            from router.replicas.link import Link
            from router.replicas.sharing import Sharing

            identity = new_identity(terms.replicas.name)
            self.sharing = Sharing(identity, core, tell, uses, _dump)
            url, alike = parse_redis_url(terms.url), terms_of(terms, VERSION)
            self.link = Link(url, terms.replicas, identity, self.sharing, alike)
            clock = self.link.leases.clock
            self.sharing.kv.stand(self.link.leases, terms.replicas.lease_s)
            self.borrowing = Borrowing(self.sharing.kv, core.workers, tell, clock)

    @property
    def claim(self) -> Callable[[int, str], Claim] | None:
        """For a worker's events, at an address, that one router alone can have."""
        return None if self.sharing is None else self.sharing.kv.claim

    @property
    def borrow(self) -> Callable[[int, Callable[[], int]], Awaitable[bool]] | None:
        """For events that an engine cannot tell again (`kv_borrowing.Borrowing.borrow`)."""
        return None if self.borrowing is None else self.borrowing.borrow

    async def agree(self) -> None:
        """Raises ReplicaRefusedError where a router runs that differs in what must be alike."""
        if self.link is not None:
            await self.link.agree()

    def start(self) -> None:
        """Be there, as soon as Redis is."""
        if self.link is not None:
            self.link.start()

    def renew(self, terms: ReplicaTerms) -> None:
        """The configuration was read anew. Peers look at what differs from now on."""
        if self.link is not None:
            self._reading = asyncio.create_task(self._renew(self.link, terms))

    async def aclose(self) -> None:
        """Say goodbye, within a second."""
        if self._reading is not None:
            self._reading.cancel()
        if self.link is not None:
            await self.link.aclose()

    async def _renew(self, link: Link, terms: ReplicaTerms) -> None:
        assert terms.url is not None  # a reload cannot take it away
        alike = await asyncio.to_thread(terms_of, terms, VERSION)
        link.renew(alike, parse_redis_url(terms.url))


def _dump(frozen: FrozenCache, done: Callable[[bytes], None]) -> None:
    """In a thread: it takes a while."""
    made = asyncio.get_running_loop().run_in_executor(None, frozen.encoded)
    made.add_done_callback(lambda made: None if made.cancelled() else done(made.result()))

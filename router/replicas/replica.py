"""Makes this router one of several replicas, with shared state, a connection to Redis, and settings
that must agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from policies.facts import Fact
from router.core.core import RouterCore
from router.core.workers.snapshot import FrozenCache
from router.keys.quota import SharedUse
from router.redis.url import parse_redis_url
from router.replicas.kv_events import Borrowing
from router.replicas.link import Link
from router.replicas.membership import new_identity, terms_of
from router.replicas.messages import VERSION
from router.replicas.settings import ReplicaTerms
from router.replicas.sharing import Sharing


class Replica:
    """This router as one of several replicas. Lifetime: process. `agree`, `start` and `aclose` are
    called once each, in this order.
    """

    def __init__(
        self,
        terms: ReplicaTerms,
        core: RouterCore,
        report_fact: Callable[[Fact], None],
        uses: SharedUse | None,
    ) -> None:
        """Prepare the shared state. `report_fact` passes a fact to the core; `uses` is the shared
        use of API keys, or None if there are no keys.
        """
        identity = new_identity(terms.replicas.name)
        url, alike = parse_redis_url(terms.url), terms_of(terms, VERSION)
        self.sharing = Sharing(identity, core, report_fact, uses, _dump)
        self.link = Link(url, terms.replicas, identity, self.sharing, alike)
        self.sharing.kv.set_leases(self.link.leases, terms.replicas.lease_s)
        clock = self.link.leases.clock
        self.borrowing = Borrowing(self.sharing.kv, core.workers, report_fact, clock)
        self._reading: asyncio.Task[None] | None = None

    def renew(self, terms: ReplicaTerms) -> None:
        """Use a reloaded configuration, with which peers compare their settings from now on."""
        self._reading = asyncio.create_task(self._renew(terms))

    async def aclose(self) -> None:
        """Leave the other replicas and close the connection to Redis, within a second."""
        if self._reading is not None:
            self._reading.cancel()
        await self.link.aclose()

    async def _renew(self, terms: ReplicaTerms) -> None:
        alike = await asyncio.to_thread(terms_of, terms, VERSION)
        self.link.renew(alike, parse_redis_url(terms.url))


def _dump(frozen: FrozenCache, done: Callable[[bytes], None]) -> None:
    """Encode the cache in a thread, because that takes a while, and call `done` with the bytes."""
    made = asyncio.get_running_loop().run_in_executor(None, frozen.encoded)
    made.add_done_callback(lambda made: None if made.cancelled() else done(made.result()))

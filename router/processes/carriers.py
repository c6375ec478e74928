"""The workers as a satellite knows them: where to send what the leader decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.config.schema import Config
from router.fleet_io.trust import WorkerTrust
from router.fleet_io.upstreams import upstream_at
from router.http.relay.native import NativeRelay
from router.http.relay.reply import RelayLimits
from router.http.relay.upstream import Upstream
from router.processes.messages import Carrying
from router.terms import fleet_terms
from router.worker_spec import parse_worker_spec


@dataclass(slots=True)
class RemoteCarrier:
    """Lifetime: worker."""

    upstream: Upstream
    rank: int | None
    kind: str | None
    abandoned: int


class Carriers:
    """Lifetime: process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[int, RemoteCarrier] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.terms: tuple[WorkerTrust, NativeRelay | None, RelayLimits] | None = None

    def get(self, worker_id: int) -> RemoteCarrier | None:
        """The worker; None: it is not known, or not any more."""
        return self._known.get(worker_id)

    def see(self, workers: Iterable[Carrying]) -> None:
        """Take over the leader's view; what runs at workers that are gone is cut off."""
        gone = dict(self._known)
        for told in workers:
            known = gone.pop(told.worker_id, None)
            if known is None:
                upstream = self._upstream(told.spec)
                known = RemoteCarrier(upstream, told.rank, told.kind, told.abandoned)
                self._known[told.worker_id] = known
            known.rank, known.kind = told.rank, told.kind
            if known.abandoned != told.abandoned:
                known.abandoned = told.abandoned
                known.upstream.abandon_silent()
        for worker_id, carrier in gone.items():
            del self._known[worker_id]
            closing = asyncio.create_task(carrier.upstream.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _upstream(self, spec: str) -> Upstream:
        assert self.terms is not None, "the leader tells its configuration first"
        return upstream_at(parse_worker_spec(spec), self._clock, *self.terms)

    async def aclose(self) -> None:
        """Close all connections."""
        self.see(())
        if self._closing:
            await asyncio.wait(set(self._closing))
        if self.terms is not None and (relay := self.terms[1]) is not None:
            relay.stop()


def terms_of(config: Config) -> tuple[WorkerTrust, NativeRelay | None, RelayLimits]:
    """Of connections to workers."""
    relay = NativeRelay.wanted(config.relay, config.intervals.gather_s)
    return WorkerTrust(config.workers_tls), relay, fleet_terms(config).relay

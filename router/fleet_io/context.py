"""What all members of the fleet share: connections, clock, times, and where their facts go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import aiohttp
import zmq.asyncio

from policies.facts import KvEvents, LoadReport, Probed, ReplayEnd, WorkerChange
from router.events.claim import Claim
from router.events.hub import Hubs
from router.events.telling import Borrow
from router.fleet_io.shared import Answers
from router.fleet_io.trust import WorkerTrust
from router.http.relay.native import NativeRelay
from router.http.relay.reply import RelayLimits

if TYPE_CHECKING:
    from router.fleet_io.member import Member

_SCRAPES_PER_S_MAX = 200.0  # of the whole fleet; a larger fleet is scraped less often
FRESH = 0.25  # of the time between two questions: an answer to another rank is taken for ours

WorkerFact = WorkerChange | LoadReport | KvEvents | ReplayEnd | Probed
End = Literal["down", "anew", "broken"]  # of following a worker


@dataclass(frozen=True, slots=True)
class FleetTerms:
    """Times and bounds of following workers. Lifetime: process, replaced on reload."""

    probe_s: float  # one health probe, scrape or recognition
    load_report_s: float  # between two scrapes of one worker
    health_s: float  # between two health probes of one worker
    backlog_batches: int
    relay: RelayLimits
    drain_s: float = 600.0  # what runs at a worker that leaves may take; 0: as long as it does


@dataclass(slots=True)
class FleetContext:
    """What all members share. Lifetime: process."""

    http: aiohttp.ClientSession
    zmq: zmq.asyncio.Context
    clock: Callable[[], float]
    tell: Callable[[WorkerFact], None]
    terms: FleetTerms
    relay: NativeRelay | None = None  # None: all is relayed in Python
    members: dict[int, Member] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)  # that ranks of one engine share
    hubs: Hubs = field(default_factory=Hubs)  # of event addresses that members share
    trust: WorkerTrust = field(default_factory=WorkerTrust)
    # The number of the first batch that a worker's new feed asks for.
    first_seq: Callable[[int], int] = lambda worker_id: 0
    # Whether it takes a snapshot to know a worker's cache.
    wants_snapshot: Callable[[int], bool] = lambda worker_id: False
    # For events that one router alone can have; None: this one shares nothing.
    claim: Callable[[int, str], Claim] | None = None
    borrow: Borrow | None = None  # for events that an engine cannot tell again

    @property
    def scrape_interval_s(self) -> float:
        """Seconds between two scrapes of one worker."""
        return max(self.terms.load_report_s, len(self.members) / _SCRAPES_PER_S_MAX)


def refused(error: Exception) -> bool:
    """Nobody listens at its port: there is no engine any more, and no need to ask again."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )

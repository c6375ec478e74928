"""The objects that all workers of the fleet share: connections, the clock, time limits, and answers
that several ranks of one engine use together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar
from weakref import WeakValueDictionary

import aiohttp
import msgspec
import zmq.asyncio
from msgspec import Meta

from policies.facts import LoadReport, Probed, Silence, WorkerChange
from router.engines.adapter import MAX_MODELS
from router.events.delivery import Borrow, Claim, FeedFact, SharedReaders
from router.events.sources import NO_OTHERS, EventHosts
from router.fleet.pauses import Pauses
from router.fleet.upstreams import GrpcOpener, WorkerTrust
from router.http.reply import RelayLimits
from router.upstream.native import NativeRelay

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """The latest answer of an engine to one question, shared by all ranks that ask it. Lifetime: as
    long as a worker asks the question.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._at_s: float | None = None
        self._answer: T | None = None
        self._error: Exception | None = None

    async def get(
        self, fetch: Callable[[], Awaitable[T]], clock: Callable[[], float], fresh_s: float
    ) -> T:
        """Return the answer; call `fetch` for a new one if it is older than `fresh_s` seconds.
        Raises the error that `fetch` raised.

        While one caller asks, further callers wait for the same answer. If the first caller is
        cancelled, the next one asks.
        """
        async with self._lock:
            if self._at_s is None or clock() - self._at_s > fresh_s:
                self._at_s = self._answer = self._error = None
                try:
                    self._answer = await fetch()
                except Exception as error:  # noqa: BLE001 - it is an answer to all
                    self._error = error
                self._at_s = clock()
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]  # set, as there is no error


class SharedAnswers:
    """The latest answers of engines, by question. Lifetime: process."""

    def __init__(self) -> None:
        self._shared: WeakValueDictionary[Hashable, SharedAnswer[Any]] = WeakValueDictionary()

    def to(self, question: Hashable) -> SharedAnswer[Any]:
        """Return the shared answer for `question`. It is kept only while a caller holds a reference
        to it.
        """
        shared = self._shared.get(question)
        if shared is None:
            shared = self._shared[question] = SharedAnswer()
        return shared


_SCRAPES_PER_S_MAX = 200.0  # of the whole fleet; a larger fleet is scraped less often
# While no request is under way, here or at the worker, a scrape comes after this many intervals,
# but at least this often.
_QUIET_SCRAPES, _QUIET_SCRAPE_S = 8, 2.0
FRESH = 0.25  # of the time between two questions: an answer to another rank is taken for ours


def _busy() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


WorkerFact = WorkerChange | LoadReport | FeedFact | Probed | Silence
# Of following a worker. "asleep" and "paused": its engine lives on and takes no requests. "more":
# it serves on, and answers where it did not when it was recognized.
End = Literal["down", "asleep", "paused", "anew", "broken", "more"]


class HealthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that decide what failed health probes mean for a worker. Lifetime: until the
    next reload.
    """

    probes: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000,
            description=(
                "number of probes in a row: a worker that answers so many with errors is down; a "
                "worker that answers none of so many loses its requests to other workers"
            ),
        ),
    ] = 2
    panic_share: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description=(
                "share of a model's workers: if more of them answer no probes, no request moves, "
                "since the network is the likelier cause; 1: requests always move"
            ),
        ),
    ] = 0.5
    silent_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400.0,
            description=("time without answers to probes after which a worker is down, seconds"),
        ),
    ] = 300.0


@dataclass(frozen=True, slots=True)
class FleetTerms:
    """The times and limits by which the router watches workers. Lifetime: process, replaced on
    reload.
    """

    probe_s: float  # one health probe, scrape or recognition
    load_report_s: float  # between two scrapes of one worker
    health_s: float  # between two health probes of one worker
    backlog_batches: int
    relay: RelayLimits
    # The longest time that requests at a leaving worker may take; 0: no limit.
    drain_s: float = 600.0
    probes: int = 2  # in a row that fail: it is down, or what waits there goes elsewhere
    silent_s: float = 300.0  # that a worker may be silent before it is down, its cache forgotten
    ranks: int = 64  # data-parallel ranks of one URL that become workers
    models: int = MAX_MODELS  # of one worker that are served
    event_hosts: EventHosts = NO_OTHERS  # besides its own, that an engine may name


@dataclass(slots=True)
class FleetContext:
    """The connections, the clock and the limits that all workers of the fleet share. Lifetime:
    process.
    """

    http: aiohttp.ClientSession
    zmq: zmq.asyncio.Context
    clock: Callable[[], float]
    report_fact: Callable[[WorkerFact], None]
    terms: FleetTerms
    relay: NativeRelay | None = None  # None: all is relayed in Python
    answers: SharedAnswers = field(default_factory=SharedAnswers)  # that ranks of one engine share
    readers: SharedReaders = field(
        default_factory=SharedReaders
    )  # of event addresses that members share
    trust: WorkerTrust = field(default_factory=WorkerTrust)
    # Opens gRPC to a worker at an address; None: this router does not use gRPC.
    grpc: GrpcOpener | None = None
    # The number of the first batch that a worker's new feed asks for.
    first_seq: Callable[[int], int] = lambda worker_id: 0
    # Whether it takes a snapshot to know a worker's cache.
    wants_snapshot: Callable[[int], bool] = lambda worker_id: False
    # For events that only one router can read; None: this router shares no state.
    claim: Callable[[int, str], Claim] | None = None
    borrow: Borrow | None = None  # for events that an engine cannot replay
    # Set while requests are under way that this router knows of, as of its latest tick.
    busy: asyncio.Event = field(default_factory=_busy)
    worker_count: Callable[[], int] = lambda: 0  # of the whole fleet
    pauses: Pauses = field(init=False)

    def __post_init__(self) -> None:
        self.pauses = Pauses(self.clock)

    def renew(self, terms: FleetTerms) -> None:
        """Use the times and limits in `terms` for all workers from now on."""
        self.terms = terms

    @property
    def scrape_interval_s(self) -> float:
        """The seconds between two scrapes of one worker."""
        return max(self.terms.load_report_s, self.worker_count() / _SCRAPES_PER_S_MAX)

    async def until_scrape(self, is_busy: bool) -> None:
        """Wait until the metrics of a worker should be scraped again. `is_busy` says whether its
        latest metrics show requests.

        The wait is longer while all workers are idle; a request that arrives cuts it short.
        """
        interval_s = self.scrape_interval_s
        quiet_s = max(min(interval_s * _QUIET_SCRAPES, _QUIET_SCRAPE_S), interval_s)
        if is_busy or self.busy.is_set():
            await asyncio.sleep(interval_s)
            return
        began_s = self.clock()
        with suppress(TimeoutError):
            async with asyncio.timeout(quiet_s):
                await self.busy.wait()
            # Not all workers at once: each when it would have been scraped anyhow.
            await asyncio.sleep((began_s - self.clock()) % interval_s)


def refused(error: Exception) -> bool:
    """Return whether the error means that the worker's port refuses connections: its engine is
    gone, and a retry is useless.
    """
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )

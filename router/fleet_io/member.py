"""One worker's life as the router sees it: recognize, follow its events, probe, scrape."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import zmq.asyncio

from engine.wire import WireError
from policies.facts import KvEvents, LoadReport, ReplayEnd, WorkerChange
from router.events.feed import EventFeed
from router.fleet_io.recognize import Recognized, UnrecognizedError, recognize, scrape
from router.http.relay.reply import RelayLimits
from router.http.relay.upstream import Upstream
from router.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

_DOWN_AFTER = 2  # health probes in a row that fail
_SCRAPES_PER_S_MAX = 200.0  # of the whole fleet; a larger fleet is scraped less often

WorkerFact = WorkerChange | LoadReport | KvEvents | ReplayEnd


@dataclass(frozen=True, slots=True)
class FleetTerms:
    """Times and bounds of following workers. Lifetime: process, replaced on reload."""

    probe_s: float  # one health probe, scrape or recognition
    load_report_s: float  # between two scrapes of one worker
    health_s: float  # between two health probes of one worker
    backlog_batches: int
    relay: RelayLimits


@dataclass(slots=True)
class FleetContext:
    """What all members share. Lifetime: process."""

    http: aiohttp.ClientSession
    zmq: zmq.asyncio.Context
    clock: Callable[[], float]
    tell: Callable[[WorkerFact], None]
    terms: FleetTerms
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def scrape_interval_s(self) -> float:
        """Seconds between two scrapes of one worker."""
        return max(self.terms.load_report_s, len(self.members) / _SCRAPES_PER_S_MAX)


class Member:
    """Lifetime: worker. `run` ends when cancelled."""

    def __init__(self, worker_id: int, spec: WorkerSpec, context: FleetContext) -> None:
        self.worker_id = worker_id
        self.spec = spec
        self.recognized: Recognized | None = None
        self.feed: EventFeed | None = None
        self.trouble = ""  # why it is not ready, for people
        self.draining = False
        self.leaving = False  # to be removed once idle
        self._context = context
        self.upstream = _upstream(spec.url, context)

    async def run(self) -> None:
        """Recognize it, follow it until it fails its probes, and begin again."""
        while True:
            recognized = await self._recognized()
            self._tell_state("draining" if self.draining else "ready", recognized)
            async with asyncio.TaskGroup() as tasks:
                following = [tasks.create_task(self._scrape_loads())] * recognized.reports_load
                if recognized.source is not None:
                    self.feed = self._open_feed(recognized)
                    following.append(tasks.create_task(self.feed.run()))
                await self._until_down()
                for task in following:
                    task.cancel()
            self.feed = None
            log.warning("worker %d (%s) is down: %s", self.worker_id, self.spec.url, self.trouble)
            self._tell_state("down", None)

    def drain(self) -> None:
        """Send it nothing new; what runs there finishes."""
        self.draining = True
        if self.recognized is not None:
            self._tell_state("draining", None)

    async def _recognized(self) -> Recognized:
        terms = self._context.terms
        while True:
            try:
                self.recognized = await recognize(self._context.http, self.spec, terms.probe_s)
            except (UnrecognizedError, WireError, aiohttp.ClientError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
                if trouble != self.trouble:
                    log.info("worker %d (%s): %s", self.worker_id, self.spec.url, trouble)
                self.trouble = trouble
                await asyncio.sleep(terms.health_s)
            else:
                self.trouble = ""
                log.info("worker %d (%s): %s", self.worker_id, self.spec.url, self.recognized)
                return self.recognized

    def _open_feed(self, recognized: Recognized) -> EventFeed:
        assert recognized.source is not None
        context = self._context
        return EventFeed(
            worker_id=self.worker_id,
            model=recognized.facts.models[0],
            source=recognized.source,
            tell=context.tell,
            clock=context.clock,
            http=context.http,
            zmq_context=context.zmq,
            timeout_s=context.terms.probe_s,
            backlog_batches=context.terms.backlog_batches,
        )

    async def _until_down(self) -> None:
        failures = 0
        while failures < _DOWN_AFTER:
            await asyncio.sleep(self._context.terms.health_s)
            failures = 0 if await self._healthy() else failures + 1

    async def _healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=self._context.terms.probe_s)
        try:
            async with self._context.http.get(f"{self.spec.url}/health", timeout=timeout) as reply:
                self.trouble = "" if reply.status < 500 else f"GET /health answered {reply.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            self.trouble = f"GET /health: {str(error) or type(error).__name__}"
        return not self.trouble

    async def _scrape_loads(self) -> None:
        context = self._context
        timeout = aiohttp.ClientTimeout(total=context.terms.probe_s)
        while True:
            try:
                load = await scrape(context.http, self.spec.url, timeout)
            except (WireError, aiohttp.ClientError, TimeoutError) as error:
                log.debug("worker %d: no load report: %r", self.worker_id, error)
            else:
                capacity = load.kv_capacity_tokens
                used = load.kv_usage * capacity if load.kv_usage is not None and capacity else None
                context.tell(
                    LoadReport(
                        now_s=context.clock(),
                        worker_id=self.worker_id,
                        running=load.running,
                        waiting=load.waiting,
                        kv_used_tokens=float("nan") if used is None else used,
                    )
                )
            await asyncio.sleep(context.scrape_interval_s)

    def _tell_state(
        self, state: Literal["ready", "draining", "down"], recognized: Recognized | None
    ) -> None:
        facts = None if recognized is None else recognized.facts
        self._context.tell(WorkerChange(self._context.clock(), self.worker_id, state, facts))


def _upstream(url: str, context: FleetContext) -> Upstream:
    parts = urlsplit(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Upstream(
        parts.hostname or "",
        parts.port or (443 if tls else 80),
        context.clock,
        base_path=parts.path.rstrip("/"),
        tls=tls,
        limits=context.terms.relay,
    )

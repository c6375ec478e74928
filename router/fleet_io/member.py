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
from router.events.feed import Feed, open_feed
from router.events.hub import Hubs
from router.events.telling import FeedContext
from router.fleet_io.recognize import (
    Recognized,
    UnrecognizedError,
    recognize,
    scrape,
    with_thresholds,
)
from router.http.relay.reply import RelayLimits
from router.http.relay.upstream import Upstream
from router.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

_DOWN_AFTER = 2  # health probes in a row that fail
_SCRAPES_PER_S_MAX = 200.0  # of the whole fleet; a larger fleet is scraped less often

State = Literal["ready", "draining", "down"]
End = Literal["down", "anew", "broken"]
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
    hubs: Hubs = field(default_factory=Hubs)  # of event addresses that members share
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
        self.feed: Feed | None = None
        self.trouble = ""  # why it is not ready, for people
        self.draining = False
        self.leaving = False  # to be removed once idle
        self._state: State = "down"  # as last told; before that nobody knows of it
        self._context = context
        self.upstream = _upstream(spec.url, context)

    async def run(self) -> None:
        """Recognize it, follow it until it is down, and begin again."""
        while True:
            recognized = with_thresholds(await self._recognized(), self.spec)
            self._tell_state("draining" if self.draining else "ready", recognized)
            end = await self._follow(recognized)
            log.warning("worker %d (%s) is down: %s", self.worker_id, self.spec.url, self.trouble)
            self._tell_state("down", None)
            if end == "anew":  # it serves, though not with the cache we knew
                self._tell_state("draining" if self.draining else "ready", None)
            elif end == "broken":
                await asyncio.sleep(self._context.terms.health_s)
            elif self._replaceable(recognized):
                self.upstream.abandon_silent()

    def _replaceable(self, recognized: Recognized) -> bool:
        """Whether others can answer what it was asked; else it is better to wait for it."""
        others = (m for m in self._context.members.values() if m is not self and m.ready)
        served = {name for m in others if m.recognized for name in m.recognized.facts.models}
        return served.issuperset(recognized.facts.models)

    async def _follow(self, recognized: Recognized) -> End:
        """Listen, probe and scrape until one of these ends; says how.

        A defect in one must not end the worker's life here: it is told, and all begin again.
        """
        tasks: list[asyncio.Task[End]] = [asyncio.create_task(self._until_down())]
        if recognized.reports_load:
            tasks.append(asyncio.create_task(self._scrape_loads()))
        if recognized.source is not None:
            self.feed = self._open_feed(recognized)
            tasks.append(asyncio.create_task(_endless(self.feed)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()]
        finally:
            self.feed = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in ended:
            if (error := task.exception()) is not None:
                log.error("worker %d: following it broke", self.worker_id, exc_info=error)
                self.trouble = f"following it broke: {error!r}"
                return "broken"
        return ended[0].result()  # the probes come first: they know best

    def respec(self, spec: WorkerSpec) -> None:
        """Take over other thresholds or another weight; all else of `spec` must be as it was."""
        self.spec = spec
        if self.recognized is not None:
            self.recognized = with_thresholds(self.recognized, spec)
            self._tell_state(self._state, self.recognized)

    @property
    def ready(self) -> bool:
        """Whether it was told to be ready, for all its probes say."""
        return self._state == "ready"

    def drain(self, by: str) -> None:
        """Send it nothing new; what runs there finishes. `by` says in the log who asked for it."""
        log.info("worker %d (%s) is draining, by %s", self.worker_id, self.spec.url, by)
        self.draining = True
        if self._state == "ready":
            self._tell_state("draining", None)

    async def _recognized(self) -> Recognized:
        terms = self._context.terms
        while True:
            try:
                recognized = await recognize(self._context.http, self.spec, terms.probe_s)
            except (UnrecognizedError, WireError, aiohttp.ClientError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
                if trouble != self.trouble:
                    log.info(
                        "worker %d (%s) is not recognized: %s",
                        self.worker_id,
                        self.spec.url,
                        trouble,
                    )
                self.trouble = trouble
                await asyncio.sleep(terms.health_s)
            else:
                self._announce(recognized)
                self.recognized = recognized
                self.trouble = ""
                return recognized

    def _announce(self, recognized: Recognized) -> None:
        back = "worker %d (%s) is back: %s"
        joined = "worker %d (%s) joined: %s"
        line = joined if self.recognized is None else back
        log.info(line, self.worker_id, self.spec.url, recognized)

    def _open_feed(self, recognized: Recognized) -> Feed:
        assert recognized.source is not None
        context = self._context
        shared = FeedContext(
            http=context.http,
            zmq=context.zmq,
            clock=context.clock,
            tell=context.tell,
            hubs=context.hubs,
            timeout_s=context.terms.probe_s,
            backlog_batches=context.terms.backlog_batches,
        )
        return open_feed(recognized.source, self.worker_id, recognized.facts.models[0], shared)

    async def _until_down(self) -> End:
        failures = 0
        while failures < _DOWN_AFTER:
            await asyncio.sleep(self._context.terms.health_s)
            try:
                self.trouble = await self._complaint()
            except (aiohttp.ClientError, TimeoutError) as error:
                self.trouble = f"GET /health: {str(error) or type(error).__name__}"
                if _refused(error):
                    return "down"
            failures = failures + 1 if self.trouble else 0
        return "down"

    async def _complaint(self) -> str:
        """What is wrong by its own account; empty when nothing is."""
        timeout = aiohttp.ClientTimeout(total=self._context.terms.probe_s)
        url = f"{self.spec.url}/health"
        async with self._context.http.get(url, timeout=timeout, allow_redirects=False) as reply:
            return "" if reply.status < 500 else f"GET /health answered {reply.status}"

    async def _scrape_loads(self) -> End:
        """Tell the core its load, until the figures show that its engine began anew or is gone."""
        context = self._context
        queried_tokens = 0
        timeout = aiohttp.ClientTimeout(total=context.terms.probe_s)
        while True:
            try:
                load = await scrape(context.http, self.spec.url, timeout)
            except (WireError, aiohttp.ClientError, TimeoutError) as error:
                log.debug("worker %d: no load report: %r", self.worker_id, error)
                if _refused(error):
                    self.trouble = f"GET /metrics: {error}"
                    return "down"
            else:
                if (load.prefix_query_tokens or 0) < queried_tokens:
                    self.trouble = "its engine was started anew: its counters went back"
                    return "anew"
                queried_tokens = load.prefix_query_tokens or 0
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

    def _tell_state(self, state: State, recognized: Recognized | None) -> None:
        self._state = state
        facts = None if recognized is None else recognized.facts
        self._context.tell(WorkerChange(self._context.clock(), self.worker_id, state, facts))


async def _endless(feed: Feed) -> End:
    await feed.run()
    return "broken"


def _refused(error: Exception) -> bool:
    """Nobody listens at its port: there is no engine any more, and no need to ask again."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )


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

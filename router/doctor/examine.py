"""Examines servers: recognizes them, reads their figures again and again, and judges the figures.

report = await examine(["http://127.0.0.1:8000"], Options(seconds=10))
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from router.doctor.clients import FileError, error_texts, request_kinds
from router.doctor.evidence import (
    ClientFacts,
    Evidence,
    RouterEvidence,
    evidence_of,
    router_evidence,
)
from router.doctor.fetch import MetricsSource, Reader, read_router
from router.doctor.judge import judge
from router.doctor.probe import LoadProbe, ProbeLimits, check_allowed
from router.doctor.readings import ROUTER_WANTED, Gauges, Reading, Watched, parse_gauges
from router.doctor.report import DoctorError, DoctorReport

T = TypeVar("T")

MAX_SERVERS = 64
LEAST_S, MOST_S = 0.2, 600.0
_SAMPLES_PER_S = 1.0
_MIN_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an examination, and the facts that the operator gives."""

    seconds: float = 10.0
    timeout_s: float = 5.0  # of each page
    router: str | None = None  # our router's admin port
    counts: Callable[[], Awaitable[bytes]] | None = None  # its metrics, where we are the router
    log: Path | None = None  # error texts
    requests: Path | None = None  # a request a line
    concurrency: int | None = None
    connections: int | None = None
    input_tokens: float | None = None
    max_tokens: float | None = None
    max_num_tokens: float | None = None
    probe: ProbeLimits | None = None


def _silent(line: str) -> None:
    """Ignore a line that reports the progress of an examination."""


async def examine(
    specs: Sequence[str], options: Options, progress: Callable[[str], None] = _silent
) -> DoctorReport:
    """Watch the servers, each given as `URL` or `URL,metrics=URL`, and return the report.

    Raises DoctorError if a server cannot be examined or an option is out of range.
    """
    if not 1 <= len(specs) <= MAX_SERVERS:
        raise DoctorError(
            f"got {len(specs)} servers, expected 1 to {MAX_SERVERS}: give the engines' URLs, as in "
            "http://gpu1:8000, or a router's with --routing"
        )
    if not LEAST_S <= options.seconds <= MOST_S:
        raise DoctorError(f"{options.seconds:g} s cannot be watched; {LEAST_S:g} to {MOST_S:g}")
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
        readers = [Reader(http, spec, options.timeout_s) for spec in specs]
        if options.probe is not None:
            for reader in readers:  # before anything is asked of it
                check_allowed(reader.url, options.probe.hosts)
        sources = await _all([reader.recognize() for reader in readers])
        for one in sources:
            progress(f"{one.server.url}: {one.server.kind} {one.server.version}".rstrip())
        return await _Examination(http, readers, sources, options, progress).run()


@dataclass(slots=True)
class _Examination:
    """The state of one examination. Lifetime: one call of `examine`."""

    http: aiohttp.ClientSession
    readers: Sequence[Reader]
    sources: Sequence[MetricsSource]
    options: Options
    progress: Callable[[str], None]
    readings: list[list[Reading]] = field(default_factory=list)  # each look's, server by server
    router: list[Gauges] = field(default_factory=list)

    async def run(self) -> DoctorReport:
        """Send the probe's load, watch the servers, and judge. Raises DoctorError if the servers
        cannot be examined.
        """
        facts = _client_facts(self.options)
        probes: list[LoadProbe] = []
        measured: Mapping[str, Any] | None = None
        if self.options.probe is not None:
            probes, measured = await self._measured(self.options.probe)
        await self._watch(probes)
        watched = [
            Watched(source.server, tuple(look[n] for look in self.readings))
            for n, source in enumerate(self.sources)
        ]
        router = router_evidence(self.router) if self.router else None
        evidence = Evidence(
            tuple(evidence_of(one) for one in watched), _with_probe(facts, router, probes)
        )
        seconds = max(one.readings[-1].at_s - one.readings[0].at_s for one in watched)
        shown = probes[0].shown() if probes else {}
        unread = (*(s for one in self.sources for s in one.server.unread), *_unread(self.options))
        unread += tuple(
            f"{m.config.name}: it was loaded anew meanwhile"
            for server in evidence.servers
            for m in server.models.values()
            if m.restarted
        )
        return DoctorReport(evidence, judge(evidence), seconds, unread, measured, shown)

    async def _measured(self, limits: ProbeLimits) -> tuple[list[LoadProbe], Mapping[str, Any]]:
        """Return the load probes for all servers, and the service times that were measured at the
        first server.
        """
        clock = asyncio.get_running_loop().time
        probes = [LoadProbe(self.http, source.server, limits, clock) for source in self.sources]
        self.progress(f"probing {probes[0].model}: at most {limits.requests} requests")
        reader, source = self.readers[0], self.sources[0]
        return probes, await probes[0].measure(lambda: reader.read(source, clock()))

    async def _watch(self, probes: Sequence[LoadProbe]) -> None:
        """Read all servers repeatedly for the requested time, or as long as the probes' load
        lasts.
        """
        await self._look()
        loads = [asyncio.create_task(probe.load()) for probe in probes]
        clock, seconds = asyncio.get_running_loop().time, self.options.seconds
        looks, begun_s = max(_MIN_SAMPLES, round(seconds * _SAMPLES_PER_S)), clock()
        try:
            for look in range(1, looks + 1):
                wait_s = max(begun_s + seconds * look / looks - clock(), 0.0)
                if not loads:
                    await asyncio.sleep(wait_s)
                else:
                    await asyncio.wait(loads, timeout=wait_s)
                over = bool(loads) and all(load.done() for load in loads)
                await self._look()
                self.progress(f"watched {clock() - begun_s:.0f} of {seconds:.0f} s")
                if over:
                    return
        finally:
            for load in loads:
                load.cancel()
            for ended in await asyncio.gather(*loads, return_exceptions=True):
                # A defect of this program: failures of servers are counted instead.
                if isinstance(ended, Exception):
                    raise ended

    async def _look(self) -> None:
        """Read the figures of each server and of the router once."""
        clock = asyncio.get_running_loop().time
        pairs = zip(self.readers, self.sources, strict=True)
        self.readings.append(await _all([one.read(source, clock()) for one, source in pairs]))
        if self.options.router is not None:
            found = await read_router(self.http, self.options.router, self.options.timeout_s)
            self.router.append(found)
        elif self.options.counts is not None:
            self.router.append(parse_gauges((await self.options.counts()).decode(), ROUTER_WANTED))


async def _all(waits: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results, or raise the first DoctorError after cancelling the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(one)) for one in waits]
    except* DoctorError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _awaited(wait: Awaitable[T]) -> T:
    return await wait


def _client_facts(options: Options) -> ClientFacts:
    """Return the facts that the operator gives. Raises DoctorError if one of the operator's files
    cannot be read.
    """
    try:
        texts = error_texts(options.log) if options.log else {}
        shapes, sets = request_kinds(options.requests) if options.requests else (None, None)
    except FileError as error:
        raise DoctorError(str(error)) from error
    return ClientFacts(
        texts=texts,
        concurrency=options.concurrency,
        connections=options.connections,
        input_tokens=options.input_tokens,
        max_tokens=options.max_tokens,
        max_num_tokens=options.max_num_tokens,
        shapes=shapes,
        input_sets=sets,
    )


def _with_probe(
    facts: ClientFacts, router: RouterEvidence | None, probes: Sequence[LoadProbe]
) -> ClientFacts:
    texts = dict(facts.texts)
    for probe in probes:
        for key, count in probe.total.errors.items():
            texts[key] = texts.get(key, 0) + count
    return ClientFacts(
        texts=texts,
        router=router,
        concurrency=facts.concurrency,
        connections=facts.connections,
        input_tokens=facts.input_tokens,
        max_tokens=facts.max_tokens,
        max_num_tokens=facts.max_num_tokens,
        shapes=facts.shapes,
        input_sets=facts.input_sets,
        latencies=probes[0].latencies if probes else {},
    )


def _unread(options: Options) -> tuple[str, ...]:
    """Return the sources of evidence that the operator did not give, each with the causes that
    cannot be found without it.
    """
    lacks = []
    if options.router is None and options.counts is None:
        lacks.append("a router's counts (--router URL): causes 8, 31, 32, 35, 37")
    if options.log is None and options.probe is None:
        lacks.append("clients' error texts (--log FILE): causes 8, 9, 21, 30, 33, 34")
    if options.requests is None:
        lacks.append("shapes of requests (--requests FILE): needed to distinguish causes 3 and 4")
    return tuple(lacks)

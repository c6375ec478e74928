"""A fleet that follows sources of workers whose reports a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.engines.worker_spec import parse_worker_spec
from router.fleet.manager import FleetManager
from router.fleet.member import Member
from router.fleet.sources import Discovery, Report, ReportedWorker, Source
from tests.router.fleet.fleet_support import fleet_of
from tests.router.waiting import until


class ScriptedSource:
    """A source of workers whose reports the test decides. Lifetime: test."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[Report | Exception] = asyncio.Queue()

    async def reports(self) -> AsyncIterator[Report]:
        while True:
            one = await self.news.get()
            if isinstance(one, Exception):
                raise one
            yield one

    def report_workers(self, *texts: str, stopping: Iterable[str] = ()) -> None:
        seen = [ReportedWorker(parse_worker_spec(text), text in stopping) for text in texts]
        self.news.put_nowait(Report(tuple(seen)))

    def report_failure(self, why: str) -> None:
        self.news.put_nowait(Report(None, why))


@dataclass
class World:
    """A fleet of workers with its sources and clock. Lifetime: test."""

    manager: FleetManager
    discovery: Discovery
    sources: dict[str, ScriptedSource] = field(default_factory=dict)

    def source(self, name: str) -> ScriptedSource:
        return self.sources.setdefault(name, ScriptedSource())

    def remaining_members(self) -> list[Member]:
        return [m for m in self.manager.members.values() if not m.leaving]

    def worker_names(self) -> list[str]:
        return sorted(m.spec.name for m in self.remaining_members())

    async def until_workers(self, *names: str) -> None:
        await until(
            lambda: self.worker_names() == sorted(names), f"{names}, have {self.worker_names()}"
        )

    def source_row(self, name: str) -> dict[str, object]:
        return next(one for one in self.discovery.shown() if one["source"] == name)


@asynccontextmanager
async def world(
    *sources: str, workers: Iterable[str] = (), grace_s: float = 60.0, max_workers: int = 8
) -> AsyncIterator[World]:
    async with fleet_of(max_workers) as (manager, _):
        told: dict[str, ScriptedSource] = {}

        def opened(spec: object) -> Source:
            return told.setdefault(str(spec), ScriptedSource())

        discovery = Discovery(manager, opened, lambda: grace_s)
        specs = [parse_worker_spec(text) for text in workers]
        for spec in specs:
            manager.add(spec)
        discovery.start(specs, sources)
        yield World(manager, discovery, told)
        await discovery.aclose()

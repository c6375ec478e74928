"""The fleet follows all that names workers: the configuration and its sources."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.discovery.believed import Believed
from router.discovery.source import Report, Seen, Source
from router.discovery.spec import SourceSpec, parse_source
from router.discovery.union import union
from router.fleet_io.manager import FleetManager
from router.fleet_io.reconcile import reconcile
from router.worker_spec import WorkerSpec, WorkerSpecError, parse_worker_spec

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # between two looks at what time alone changes
_AGAIN_S = 1.0  # a source that broke is opened anew
_NAMED_MAX = 10  # in one log line

Open = Callable[[SourceSpec], Source]


@dataclass(slots=True)
class _Followed:
    """A source and what is believed of it. Lifetime: as long as it is named."""

    name: str
    believed: Believed = field(default_factory=Believed)
    task: asyncio.Task[None] | None = None


class Discovery:
    """Lifetime: process."""

    def __init__(
        self, fleet: FleetManager, open_source: Open, grace_s: Callable[[], float]
    ) -> None:
        """`grace_s`: how long a source that names nobody any more is not believed."""
        self._fleet = fleet
        self._open = open_source
        self._grace_s = grace_s
        self._configured: tuple[WorkerSpec, ...] = ()
        self._followed: dict[str, _Followed] = {}
        self._retired: list[tuple[_Followed, float]] = []  # dropped; stand until others have spoken
        self._troubles: dict[str, str] = {}  # as last logged
        self._refused: list[str] = []  # asked for again until there is room
        self._told: set[str] = set()  # what could not be done, as last logged
        self._news = asyncio.Event()
        self._said = asyncio.Event()  # a source said something
        self._looking: asyncio.Task[None] | None = None
        self.conflicts = 0  # workers that are passed over now, for another that names them too

    def start(
        self,
        configured: Iterable[WorkerSpec],
        sources: Iterable[str],
        found: Iterable[tuple[str, str]] = (),
    ) -> None:
        """The fleet has the configured workers already.

        `found`: what the router before this one believed, each with its source; a source that
        cannot be read now has said that.
        """
        self._configured = tuple(configured)
        self._follow(sources)
        before: dict[str, list[Seen]] = {}
        for name, text in found:
            try:
                before.setdefault(name, []).append(Seen(parse_worker_spec(text)))
            except WorkerSpecError as error:  # of another version
                log.warning("source %s: %s of the router before this one: %s", name, text, error)
        for name in before.keys() & self._followed.keys():
            self._followed[name].believed.remember(tuple(before[name]), self._fleet.now_s)
        self._looking = asyncio.create_task(self._look(), name="discovery")

    async def heard(self, within_s: float) -> None:
        """Return once each source has said something, or `within_s` later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._all_heard():
                    self._said.clear()
                    await self._said.wait()
        self._bring_in_line()

    def apply(self, configured: Iterable[WorkerSpec], sources: Iterable[str]) -> list[str]:
        """Another configuration. Returns which workers could not be added, and why."""
        self._configured = tuple(configured)
        self._follow(sources)
        self._fleet.forgive()
        return self._bring_in_line()

    async def aclose(self) -> None:
        """Ask nobody any more; the fleet stays as it is."""
        tasks = [one.task for one in self._followed.values() if one.task is not None]
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def found(self) -> tuple[tuple[str, str], ...]:
        """What is believed of each source, for the router that follows."""
        now_s = self._fleet.now_s
        return tuple(
            (name, str(seen.spec))
            for name, believed in self.sources.items()
            for seen in self._believed(believed, now_s)
            if not seen.stopping
        )

    @property
    def sources(self) -> Mapping[str, Believed]:
        """What is believed of each source."""
        return {name: one.believed for name, one in self._followed.items()}

    def shown(self) -> list[dict[str, Any]]:
        """The sources as the admin port shows them."""
        now_s = self._fleet.now_s
        return [
            {
                "source": name,
                "workers": len(self._believed(believed, now_s)),
                "trouble": believed.trouble or None,
                "silent_s": round(believed.silent_s(now_s), 3),
                "refused": list(believed.refused),
                "lingering": believed.lingering,
            }
            for name, believed in self.sources.items()
        ]

    def count(self, believed: Believed) -> int:
        """Workers that a source is believed to have."""
        return len(self._believed(believed, self._fleet.now_s))

    def _follow(self, sources: Iterable[str]) -> None:
        wanted = tuple(sources)
        for name in self._followed.keys() - set(wanted):
            gone = self._followed.pop(name)
            self._retired.append((gone, self._fleet.now_s))
            if gone.task is not None:
                gone.task.cancel()
        for name in wanted:
            one = self._followed.pop(name, None) or _Followed(name)  # in the order given
            self._followed[name] = one
            if one.task is None:
                one.task = asyncio.create_task(self._listen(one), name=f"source {name}")
        self._news.set()

    async def _listen(self, one: _Followed) -> None:
        """What one source says, for ever. A defect in it costs one round."""
        while True:
            try:
                async for report in self._open(parse_source(one.name)).reports():
                    self._hear(one, report)
                report = Report(None, "it ended")
            except Exception as error:  # a defect of ours: named, and begun anew
                log.error("source %s broke", one.name, exc_info=error)
                report = Report(None, f"it broke: {error!r}")
            self._hear(one, report)
            await asyncio.sleep(_AGAIN_S)

    def _hear(self, one: _Followed, report: Report) -> None:
        one.believed.take(report, self._fleet.now_s)
        said = "; ".join([one.believed.trouble, *one.believed.refused[:_NAMED_MAX]]).strip("; ")
        before = self._troubles.get(one.name, "")
        self._troubles[one.name] = said
        if said and said != before:
            log.warning("source %s: %s", one.name, said)
        elif before and not said:
            log.info("source %s: all is well again", one.name)
        self._news.set()
        self._said.set()

    async def _look(self) -> None:
        """Bring the fleet in line on news, and where time alone may change it."""
        while True:
            moves = bool(self._refused or self._retired)
            moves = moves or any(one.believed.moves for one in self._followed.values())
            try:
                async with asyncio.timeout(_LOOK_S if moves else None):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            try:
                self._bring_in_line()
            except Exception as error:
                log.error("the fleet was not brought in line", exc_info=error)
                await asyncio.sleep(_AGAIN_S)

    def _bring_in_line(self) -> list[str]:
        now_s = self._fleet.now_s
        if self._all_heard():
            self._retired.clear()
        grace_s = self._grace_s()
        self._retired = [(one, at_s) for one, at_s in self._retired if now_s - at_s < grace_s]
        followed = [*self._followed.values(), *(one for one, _ in self._retired)]
        said = [(one.name, self._believed(one.believed, now_s)) for one in followed]
        wanted, passed_over = union(self._configured, said)
        refused = reconcile(self._fleet, wanted)
        self.conflicts = len(passed_over)
        for line in [*refused, *passed_over]:
            if line not in self._told:
                log.warning("discovery: %s", line)
        self._refused, self._told = refused, {*refused, *passed_over}
        return refused

    def _believed(self, believed: Believed, now_s: float) -> list[Seen]:
        return believed.workers(now_s, self._grace_s(), self._answers)

    def _answers(self, spec: WorkerSpec) -> bool:
        """Whether any worker of it does, to probes."""
        at_url = self._fleet.at_url(spec.url)
        return any(m.answers for m in at_url if spec.rank in (None, m.spec.rank))

    def _all_heard(self) -> bool:
        return all(one.believed.heard for one in self._followed.values())

"""Keeps the fleet in line with the configuration and with all discovery sources, as far as each
source is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.engines.spec import WorkerSpec, WorkerSpecError
from router.engines.worker_spec import parse_worker_spec
from router.fleet.manager import FleetManager, reconcile
from router.fleet.wanted import CONFIGURATION, Key, WantedWorker, key_of

FLAP_S = 60.0  # gone and back within so long: it flaps
STEADY_S = 300.0  # in without a break for so long: it flaps no more
LINGER_MAX_S = 60.0
_PASTS_MAX = 8_192

Answers = Callable[[WorkerSpec], bool]


@dataclass(frozen=True, slots=True)
class ReportedWorker:
    """One worker in a discovery source's report."""

    spec: WorkerSpec
    stopping: bool = False  # it said that it ends: it gets no new requests


@dataclass(frozen=True, slots=True)
class Report:
    """All workers that a discovery source lists at one time."""

    workers: (
        tuple[ReportedWorker, ...] | None
    )  # None: the source could not be read, and its last report stays valid
    trouble: str = ""  # the source's trouble, for people
    refused: tuple[str, ...] = ()  # entries that cannot be used, and why
    # Priorities by the names of objectives, lower goes first; None: the last report stays valid.
    objectives: Mapping[str, int] | None = None


class Source(Protocol):
    """A discovery source of workers, such as a file or Kubernetes."""

    def reports(self) -> AsyncIterator[Report]:
        """Yield a complete list of workers whenever it changes; never end.

        Faults outside the router are part of a report; an exception is a defect of the router.
        """


@dataclass(slots=True)
class _Past:
    """The times when a worker last appeared in a source's reports and vanished from them, and how
    often it did both.
    """

    came_s: float
    lost_s: float = 0.0
    flaps: int = 0


class SourceTrust:
    """The workers that the router believes a discovery source to have, which may differ from its
    latest report. Lifetime: as long as the source is configured.
    """

    def __init__(self) -> None:
        self.has_reported = False  # it has said something, if only that it cannot be asked
        self.trouble = ""
        self.refused: tuple[str, ...] = ()
        self.objectives: Mapping[str, int] = {}  # priorities by name
        self.joined = self.left = self.flaps = 0  # counted since the start
        self._seen: dict[Key, ReportedWorker] = {}
        self._silent_s: float | None = None  # since when it lists no worker
        self._lingering: dict[Key, tuple[ReportedWorker, float]] = {}  # vanished, kept until then
        self._past: dict[Key, _Past] = {}

    @property
    def moves(self) -> bool:
        """True if the believed workers can change as time passes, without a new report."""
        return self._silent_s is not None or bool(self._lingering)

    def silent_s(self, now_s: float) -> float:
        """Return for how many seconds the source has listed no worker after it had listed some; 0
        if it lists some now.
        """
        return 0.0 if self._silent_s is None else now_s - self._silent_s

    def update(self, report: Report, now_s: float) -> None:
        """Process a new report from a discovery source, which lists the workers.

        If the source suddenly lists no workers at all, those of the last report are kept for a
        grace period. A worker that often comes and goes is kept for a while after it is no longer
        listed.
        """
        self.has_reported = True
        self.trouble = report.trouble
        if report.objectives is not None:
            self.objectives = report.objectives
        if report.workers is None:
            self._fall_silent(now_s)
            return
        self.refused = report.refused
        seen = {key_of(one.spec): one for one in report.workers}
        if not seen and any(not one.stopping for one in self._seen.values()):
            self.trouble = self.trouble or "it names no worker any more"
            self._fall_silent(now_s)
            return
        self._silent_s = None
        for key, one in self._seen.items():
            if key not in seen:
                self._lose(key, one, now_s)
        for key in seen.keys() - self._seen.keys():
            self._gain(key, now_s)
        self._seen = seen

    def remember(self, seen: tuple[ReportedWorker, ...], now_s: float) -> None:
        """Start with the workers that the previous router believed this source to have, until the
        source reports.
        """
        self.update(Report(seen), now_s)
        self.has_reported = False

    def workers(self, now_s: float, grace_s: float, answers: Answers) -> list[ReportedWorker]:
        """Return the workers of this source that are believed to exist now. `answers` returns
        whether a worker answers probes; a worker that does is kept although its source lists
        nothing for longer than `grace_s`.
        """
        if self._silent_s is not None and now_s - self._silent_s >= grace_s:
            for key in [k for k, one in self._seen.items() if not answers(one.spec)]:
                del self._seen[key]
                self.left += 1
            if not self._seen:
                self._silent_s = None
        for key in [k for k, (_, until_s) in self._lingering.items() if until_s <= now_s]:
            del self._lingering[key]
            self.left += 1
        return [*self._seen.values(), *(one for one, _ in self._lingering.values())]

    @property
    def lingering(self) -> list[str]:
        """Return the names of workers that the source no longer lists but that are kept for a
        while.
        """
        return [one.spec.name for one, _ in self._lingering.values()]

    def _fall_silent(self, now_s: float) -> None:
        if self._silent_s is None and self._seen:
            self._silent_s = now_s

    def _lose(self, key: Key, one: ReportedWorker, now_s: float) -> None:
        past = self._past.get(key)
        if one.stopping or past is None:  # it announced that it stops, or it is not remembered
            self.left += 1
            return
        if now_s - past.came_s >= STEADY_S:
            past.flaps = 0
        past.lost_s = now_s
        if past.flaps:
            linger_s = min(2.0**past.flaps, LINGER_MAX_S)
            self._lingering[key] = one, now_s + linger_s
        else:
            self.left += 1

    def _gain(self, key: Key, now_s: float) -> None:
        past = self._past.pop(key, None)
        back = past is not None and past.lost_s > 0.0 and now_s - past.lost_s < FLAP_S
        if past is None or not back:
            past = _Past(now_s)
        else:
            past.came_s = now_s
            past.lost_s = 0.0
            past.flaps = min(past.flaps + 1, 16)
            self.flaps += 1
        if len(self._past) >= _PASTS_MAX:
            del self._past[next(iter(self._past))]  # the oldest of all remembered workers
        self._past[key] = past
        if self._lingering.pop(key, None) is None:
            self.joined += 1


def union(
    configured: Iterable[WorkerSpec], sources: Sequence[tuple[str, Iterable[ReportedWorker]]]
) -> tuple[list[WantedWorker], list[str]]:
    """Return each listed worker once, and a line for each listing that was dropped in favour of
    another.

    The configuration comes first, then the sources in their order: the first that lists a worker
    determines its options, and whether it is stopping. An engine as a whole and one of its ranks
    exclude each other.
    """
    wanted: dict[str, dict[int | None, WantedWorker]] = {}
    stopping: set[tuple[str, int | None]] = set()
    passed_over: list[str] = []

    def name(one: WantedWorker) -> bool:
        at_url = wanted.setdefault(one.spec.url, {})
        first = at_url.get(one.spec.rank) or at_url.get(None)
        if first is None and one.spec.rank is None:
            first = next(iter(at_url.values()), None)
        if first is None:
            at_url[one.spec.rank] = one
            return True
        if first.spec != one.spec:
            passed_over.append(
                f"{one.by} names {one.spec}, which {first.by} names as {first.spec}: that counts"
            )
        return False

    for spec in configured:
        name(WantedWorker(spec, CONFIGURATION))
    for by, workers in sources:
        for seen in workers:
            if name(WantedWorker(seen.spec, by)) and seen.stopping:
                stopping.add((seen.spec.url, seen.spec.rank))
    all_of_them = [one for at_url in wanted.values() for one in at_url.values()]
    return [one for one in all_of_them if one.key not in stopping], passed_over


log = logging.getLogger(__name__)

_LOOK_S = 0.25  # between two looks at changes that only time brings
_AGAIN_S = 1.0  # before a source that failed is opened again
_NAMED_MAX = 10  # in one log line

Open = Callable[[str], Source]  # by the text that names it


@dataclass(slots=True)
class _Followed:
    """One discovery source with the task that reads it and the workers it is believed to have.
    Lifetime: as long as it is configured.
    """

    name: str
    trust: SourceTrust = field(default_factory=SourceTrust)
    task: asyncio.Task[None] | None = None


class Discovery:
    """Adds and removes workers of the fleet as the configuration and all discovery sources list
    them. Lifetime: process.
    """

    def __init__(
        self, fleet: FleetManager, open_source: Open, grace_s: Callable[[], float]
    ) -> None:
        """Follow no source yet. `grace_s` returns for how many seconds the earlier workers of a
        source are kept when it suddenly lists none.
        """
        self._fleet = fleet
        self._open = open_source
        self._grace_s = grace_s
        self._configured: tuple[WorkerSpec, ...] = ()
        self._followed: dict[str, _Followed] = {}
        # Dropped sources; they count until the others have reported.
        self._retired: list[tuple[_Followed, float]] = []
        self._troubles: dict[str, str] = {}  # as last logged
        self._refused: list[str] = []  # asked for again until there is room
        self._logged_errors: set[str] = set()  # errors as they were last logged
        self._news = asyncio.Event()
        self._report_received = asyncio.Event()  # a source said something
        self._looking: asyncio.Task[None] | None = None
        self.conflicts = 0  # workers that are passed over now, for another that names them too

    def start(
        self,
        configured: Iterable[WorkerSpec],
        sources: Iterable[str],
        found: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Begin to follow the sources; the fleet already has the configured workers.

        `found` lists each worker that the previous router believed to exist, with the name of its
        source. A source that cannot be read now counts as having reported these workers.
        """
        self._configured = tuple(configured)
        self._follow(sources)
        before: dict[str, list[ReportedWorker]] = {}
        for name, text in found:
            try:
                before.setdefault(name, []).append(ReportedWorker(parse_worker_spec(text)))
            except WorkerSpecError as error:  # of another version
                log.warning("source %s: %s of the earlier router: %s", name, text, error)
        for name in before.keys() & self._followed.keys():
            self._followed[name].trust.remember(tuple(before[name]), self._fleet.now_s)
        self._looking = asyncio.create_task(self._look(), name="discovery")

    async def wait_until_reported(self, within_s: float) -> None:
        """Wait until each source has reported, at most `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._all_reported():
                    self._report_received.clear()
                    await self._report_received.wait()
        self._bring_in_line()

    def apply(self, configured: Iterable[WorkerSpec], sources: Iterable[str]) -> list[str]:
        """Follow another configuration's workers and sources. Return a line with the reason for
        each worker that could not be added.
        """
        self._configured = tuple(configured)
        self._follow(sources)
        self._fleet.allow_removed_workers()
        return self._bring_in_line()

    async def aclose(self) -> None:
        """Stop following all sources; the fleet stays as it is."""
        tasks = [one.task for one in self._followed.values() if one.task is not None]
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def found(self) -> tuple[tuple[str, str], ...]:
        """Return the workers that each source is believed to have, for the router that takes over
        this fleet.
        """
        now_s = self._fleet.now_s
        return tuple(
            (name, str(seen.spec))
            for name, believed in self.sources.items()
            for seen in self._trusted_workers(believed, now_s)
            if not seen.stopping
        )

    @property
    def sources(self) -> Mapping[str, SourceTrust]:
        """The router's trust in each source of workers, by the source's name."""
        return {name: one.trust for name, one in self._followed.items()}

    def priority_of(self, objective: str) -> int | None:
        """Return the priority of the objective with this name in the first source that has it; None
        if no source has it.
        """
        known = (one.trust.objectives.get(objective) for one in self._followed.values())
        return next((priority for priority in known if priority is not None), None)

    def shown(self) -> list[dict[str, Any]]:
        """Return a description of each source, as the admin port shows it."""
        now_s = self._fleet.now_s
        return [
            {
                "source": name,
                "workers": len(self._trusted_workers(believed, now_s)),
                "trouble": believed.trouble or None,
                "silent_s": round(believed.silent_s(now_s), 3),
                "refused": list(believed.refused),
                "lingering": believed.lingering,
            }
            for name, believed in self.sources.items()
        ]

    def count(self, trust: SourceTrust) -> int:
        """Return the number of workers that the source is believed to have now."""
        return len(self._trusted_workers(trust, self._fleet.now_s))

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
        """Process each report of one source until cancelled. After a defect of the router, start
        again.
        """
        while True:
            try:
                async for report in self._open(one.name).reports():
                    self._on_report(one, report)
                report = Report(None, "it ended")
            except Exception as error:  # a defect of the router: log it, and open the source again
                log.error("source %s failed", one.name, exc_info=error)
                report = Report(None, f"it failed: {error!r}")
            self._on_report(one, report)
            await asyncio.sleep(_AGAIN_S)

    def _on_report(self, one: _Followed, report: Report) -> None:
        one.trust.update(report, self._fleet.now_s)
        said = "; ".join([one.trust.trouble, *one.trust.refused[:_NAMED_MAX]]).strip("; ")
        before = self._troubles.get(one.name, "")
        self._troubles[one.name] = said
        if said and said != before:
            log.warning("source %s: %s", one.name, said)
        elif before and not said:
            log.info("source %s: no problem any more", one.name)
        self._news.set()
        self._report_received.set()

    async def _look(self) -> None:
        """Bring the fleet in line whenever a source has news, and whenever passing time may change
        the believed workers.
        """
        while True:
            moves = bool(self._refused or self._retired)
            moves = moves or any(one.trust.moves for one in self._followed.values())
            try:
                async with asyncio.timeout(_LOOK_S if moves else None):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            try:
                self._bring_in_line()
            except Exception as error:
                log.error("the fleet could not be changed to the sources' workers", exc_info=error)
                await asyncio.sleep(_AGAIN_S)

    def _bring_in_line(self) -> list[str]:
        now_s = self._fleet.now_s
        if self._all_reported():
            self._retired.clear()
        grace_s = self._grace_s()
        self._retired = [(one, at_s) for one, at_s in self._retired if now_s - at_s < grace_s]
        followed = [*self._followed.values(), *(one for one, _ in self._retired)]
        said = [(one.name, self._trusted_workers(one.trust, now_s)) for one in followed]
        wanted, passed_over = union(self._configured, said)
        refused = reconcile(self._fleet, wanted)
        self.conflicts = len(passed_over)
        for line in [*refused, *passed_over]:
            if line not in self._logged_errors:
                log.warning("discovery: %s", line)
        self._refused, self._logged_errors = refused, {*refused, *passed_over}
        return refused

    def _trusted_workers(self, trust: SourceTrust, now_s: float) -> list[ReportedWorker]:
        return trust.workers(now_s, self._grace_s(), self._answers)

    def _answers(self, spec: WorkerSpec) -> bool:
        """Return whether a worker of the fleet with the URL and rank of `spec` answers probes."""
        at_url = self._fleet.at_url(spec.url)
        return any(m.answers for m in at_url if spec.rank in (None, m.spec.rank))

    def _all_reported(self) -> bool:
        return all(one.trust.has_reported for one in self._followed.values())

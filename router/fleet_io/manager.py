"""The fleet: workers join, drain and leave; each is followed by one task.

An operator names an engine by its URL; where it has several data-parallel ranks, each becomes a
worker of its own (`URL#rank`), as soon as the engine says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from policies.facts import WorkerChange
from router.core.roster import TableFullError
from router.fleet_io.context import FleetContext
from router.fleet_io.member import Member, Named
from router.worker_spec import WorkerSpec, WorkerSpecError, of_rank, taken

log = logging.getLogger(__name__)

_RELOAD = "configuration reload"
_RANKS = "its engine's ranks"


class DuplicateWorkerError(Exception):
    """The URL, this rank of it, or its place at a bound endpoint is in the fleet already."""


class FleetManager:
    """Lifetime: process. Ids count up and are never reused."""

    def __init__(self, context: FleetContext, max_workers: int) -> None:
        self._context = context
        self._max_workers = max_workers
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._next_id = 0

    @property
    def members(self) -> dict[int, Member]:
        """All members by id."""
        return self._context.members

    @property
    def now_s(self) -> float:
        """The router's clock."""
        return self._context.clock()

    def add(self, spec: WorkerSpec, by: str = "configuration") -> Member:
        """Begin to follow a worker; `by` says in the log who asked for it.

        Raises DuplicateWorkerError or TableFullError.
        """
        for member in self.members.values():
            ranks = (spec.rank, member.named.spec.rank)
            clash = None in ranks or spec.rank == member.spec.rank
            if member.spec.url == spec.url and clash and not member.leaving:
                raise DuplicateWorkerError(f"{spec.name} is worker {member.worker_id} already")
        return self._add(spec, Named(spec), by)

    def _add(self, spec: WorkerSpec, named: Named, by: str) -> Member:
        for member in self.members.values():
            if spec.seat is not None and member.spec.seat == spec.seat and not member.leaving:
                raise DuplicateWorkerError(f"worker {member.worker_id} {taken(spec)}")
        if len(self.members) >= self._max_workers:
            raise TableFullError(f"all {self._max_workers} worker slots are taken (limits.workers)")
        member = Member(self._next_id, spec, named, self._context, self._fits)
        self._next_id += 1
        self.members[member.worker_id] = member
        task = asyncio.create_task(member.run(), name=f"worker {member.worker_id}")
        task.add_done_callback(_shout)
        self._tasks[member.worker_id] = task
        log.info("worker %d (%s) added, by %s", member.worker_id, spec.name, by)
        return member

    def at_url(self, url: str) -> list[Member]:
        """All workers there, ranks of one engine, but those that are gone."""
        return [member for member in self.members.values() if member.spec.url == url]

    def leave(self, member: Member, by: str) -> None:
        """Drain it, and remove it once idle (`sweep`); `by` says in the log who asked for it.

        A rank does not come back by itself, even if its engine begins anew.
        """
        _without(member)
        self._leave(member, by)

    def _leave(self, member: Member, by: str) -> None:
        member.leaving = True
        member.drain(f"{by}, to be removed when idle")

    def _fits(self, member: Member, ranks: tuple[int, ...]) -> bool:
        """Whether it stands for what it should, now that its engine has these `ranks`.

        Adds a member for each rank that has none. One whose rank is gone takes one that nobody
        has, else it leaves.
        """
        named = member.named
        if named.spec.rank is not None or member.leaving:
            return True
        wanted: tuple[int | None, ...] = ranks if len(ranks) > 1 else (None,)
        has = {m.spec.rank for m in self.members.values() if m.named is named and not m.leaving}
        missing = [rank for rank in wanted if rank not in has and rank not in named.without]
        fits = member.spec.rank in wanted
        try:
            if not fits and missing:
                member.spec = _spec_of(named, missing.pop(0))
            elif not fits:
                self._leave(member, _RANKS)
            for rank in missing:
                self._add(_spec_of(named, rank), named, _RANKS)
        except (TableFullError, DuplicateWorkerError, WorkerSpecError) as error:
            if str(error) != named.trouble:  # each of its ranks will find the same
                log.warning("%s: not all of its %d ranks: %s", named.spec.url, len(ranks), error)
            named.trouble = str(error)
        else:
            named.trouble = ""
        return fits

    async def remove(self, member: Member, how: str) -> None:
        """Remove it now: what runs there is cut off and retried elsewhere where possible.

        `how` goes to the log. Cancelling this stops the waiting only; the removal goes on.
        """
        if member.worker_id in self._tasks:
            _without(member)
            log.info("worker %d (%s) removed, %s", member.worker_id, member.spec.name, how)
        await self._part_from(member)

    async def _part_from(self, member: Member) -> None:
        task = self._tasks.pop(member.worker_id, None)
        if task is None:
            return
        del self.members[member.worker_id]
        task.cancel()  # it tells the core nothing from here on
        self._context.tell(WorkerChange(self._context.clock(), member.worker_id, "gone"))
        closing = asyncio.create_task(_close(member, task))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    def sweep(self, requests_of: Callable[[int], int]) -> None:
        """Remove those that are leaving and have nothing left to do. Called on every tick."""
        for member in list(self.members.values()):
            if member.leaving and requests_of(member.worker_id) == 0:
                removal = asyncio.create_task(self.remove(member, "idle"))
                self._closing.add(removal)
                removal.add_done_callback(self._closing.discard)

    def reconcile(self, specs: Iterable[WorkerSpec]) -> list[str]:
        """Make the fleet match a reloaded configuration: add the new, drain the dropped.

        Other thresholds or another weight change a worker in place. Returns what could not be
        done, and why.
        """
        wanted = {(spec.url, spec.rank): spec for spec in specs}
        for named in {id(m.named): m.named for m in self.members.values()}.values():
            staying = [m for m in self.members.values() if m.named is named and not m.leaving]
            spec = wanted.get((named.spec.url, named.spec.rank))
            if spec is None or not _same_but_thresholds(spec, named.spec):
                for member in staying:
                    self._leave(member, _RELOAD)
            elif staying:
                del wanted[spec.url, spec.rank]
                self._respec(named, spec, staying)
        refused = []
        for spec in wanted.values():
            try:
                self.add(spec, _RELOAD)
            except (TableFullError, DuplicateWorkerError) as error:
                refused.append(f"worker {spec.name}: {error}")
        return refused

    def _respec(self, named: Named, spec: WorkerSpec, members: Iterable[Member]) -> None:
        if spec == named.spec:
            return
        named.spec = spec
        for member in members:
            member.respec(_spec_of(named, member.spec.rank))

    async def aclose(self) -> None:
        """Stop following everybody."""
        while self.members:  # a rank may still join meanwhile
            await self._part_from(next(iter(self.members.values())))
        if self._closing:
            await asyncio.wait(set(self._closing))


async def _close(member: Member, task: asyncio.Task[None]) -> None:
    """Wait for its follower's end, and close its connections."""
    await asyncio.wait([task])
    await member.upstream.aclose()


def _spec_of(named: Named, rank: int | None) -> WorkerSpec:
    """The options of one member of `named`. Raises WorkerSpecError."""
    if rank is None or named.spec.rank is not None:
        return named.spec
    return of_rank(named.spec, rank)


def _without(member: Member) -> None:
    """An operator takes one rank out."""
    if member.named.spec.rank is None and member.spec.rank is not None:
        member.named.without.add(member.spec.rank)


def _same_but_thresholds(one: WorkerSpec, other: WorkerSpec) -> bool:
    """Whether they differ at most in what can change while the worker serves."""
    return other == replace(
        one,
        max_requests=other.max_requests,
        max_queued_tokens=other.max_queued_tokens,
        max_kv_fraction=other.max_kv_fraction,
        weight=other.weight,
    )


def _shout(task: asyncio.Task[None]) -> None:
    """A member's task only ends by being cancelled; anything else is a defect of ours."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s died", task.get_name(), exc_info=error)

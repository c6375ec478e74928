"""Manages the fleet: workers join, drain and leave, as an operator, the configuration or discovery
demands.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from policies.facts import Role, WorkerChange, WorkerFacts
from router.core.core import RouterCore
from router.core.placement.worker_caches import TableFullError
from router.core.workers.roles import RoleController, RoleSettings, WorkMeter
from router.core.workers.table import Worker, halves_missing, serves
from router.engines.spec import WorkerSpec, WorkerSpecError, taken
from router.engines.table import adapter_of
from router.fleet.context import FleetContext
from router.fleet.member import Member
from router.fleet.pauses import Pauses
from router.fleet.recognize import with_role
from router.fleet.wanted import (
    CONFIGURATION,
    Key,
    Leaving,
    NamedWorker,
    Turning,
    WantedWorker,
    key_of,
    same_but_thresholds,
    spec_of,
)

log = logging.getLogger(__name__)

_RANKS = "its engine's ranks"


class RoleRefusedError(Exception):
    """Raised when a worker cannot change to another role; the text has the reason."""


class DuplicateWorkerError(Exception):
    """Raised when a worker is added whose URL, rank, or place at a bound endpoint another worker in
    the fleet already has.
    """


class FleetManager:
    """All workers that this router follows. Worker ids are ascending numbers and never reused.
    Lifetime: process.
    """

    def __init__(self, context: FleetContext, max_workers: int) -> None:
        self._context = context
        self.members: dict[int, Member] = {}  # by id
        self._max_workers = max_workers
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._probing: dict[int, asyncio.Task[None]] = {}  # probes that the core wanted
        self._closing: set[asyncio.Task[None]] = set()
        self.dismissed: set[Key] = set()  # listed by a source, and removed by hand
        self._next_id = 0
        self.denials: set[int] = (
            set()
        )  # workers that denied a model, and did not answer for it since
        self.cut_short = 0  # removed at the end of `drain_s`, with requests
        self.turned = 0  # roles changed
        self.kept_roles = 0  # that were to change, and engines did not
        self._switching: set[asyncio.Task[None]] = set()

    @property
    def now_s(self) -> float:
        """The present time on the router's clock, in seconds."""
        return self._context.clock()

    @property
    def pauses(self) -> Pauses:
        """The times when the router itself was stopped."""
        return self._context.pauses

    def add(self, spec: WorkerSpec, by: str = CONFIGURATION, by_hand: bool = False) -> Member:
        """Begin to follow a worker; `by` is the name, in log lines, of who asked for it.

        A worker that is still leaving is kept instead: its running requests continue, and it has
        the options `spec` from now on. Ranks of its engine that an operator removed return, too.
        `by_hand` True means that the worker stays until an operator removes it, and gets requests
        although it was drained. Raises DuplicateWorkerError, TableFullError or WorkerSpecError.
        """
        leaving: list[Member] = []
        for member in self.at_url(spec.url):
            ranks = (spec.rank, member.named.spec.rank)
            if member.parting or not (None in ranks or spec.rank == member.spec.rank):
                continue
            if not member.leaving:
                return self._add_ranks(spec, member, by)
            if spec.rank in (None, member.spec.rank) or member.spec.rank is None:
                leaving.append(member)
        named = NamedWorker(spec, by, by_hand)
        if leaving:
            self._check_seat(spec)
            self._rename(leaving, named, by)
        self.dismissed.discard(key_of(spec))
        return leaving[0] if leaving else self._add(spec, named, by)

    def _add_ranks(self, spec: WorkerSpec, staying: Member, by: str) -> Member:
        """Add the ranks again that an operator removed while other ranks of the engine stayed."""
        named = staying.named
        wanted = {spec.rank} if spec.rank is not None else set(named.without)
        removed = {rank for rank in wanted if rank in named.without}
        if not removed or replace(spec, rank=None) != named.spec:
            raise DuplicateWorkerError(f"{spec.name} is worker {staying.worker_id} already")
        named.without -= removed
        of_it = [m for m in self.at_url(spec.url) if m.named is named and not m.parting]
        for member in of_it:
            if member.leaving and member.spec.rank in removed:
                self.take_back(member, by, undrain=True)
        if staying.recognized is not None:  # those that are gone already
            self._fits(staying, staying.recognized.ranks)
        new = (m for m in self.members.values() if m.named is named and m.spec.rank in removed)
        return next((m for m in new if not m.leaving), staying)

    def _rename(self, leaving: Sequence[Member], named: NamedWorker, by: str) -> None:
        """Keep workers that were leaving, because they are listed again, perhaps with other
        options.
        """
        specs = [spec_of(named, member.spec.rank) for member in leaving]
        for member, spec in zip(leaving, specs, strict=True):
            member.named = named
            if same_but_thresholds(member.as_turned(spec), member.spec):
                member.respec(spec)
            else:
                self._recognize_again_with(member, spec)
            self.take_back(member, by, undrain=named.by_hand)

    def _recognize_again_with(self, member: Member, spec: WorkerSpec) -> None:
        """Recognize the worker again with the options in `spec`. Its running requests continue and
        still count as its load.
        """
        before = self._tasks[member.worker_id]
        before.cancel()
        member.recognize_again_with(spec)

        async def follow() -> None:
            await asyncio.wait([before])
            await member.run()

        self._start(member, follow())

    def _start(self, member: Member, following: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(following, name=f"worker {member.worker_id}")
        task.add_done_callback(_log_task_error)
        self._tasks[member.worker_id] = task

    def _add(self, spec: WorkerSpec, named: NamedWorker, by: str) -> Member:
        self._check_seat(spec)
        if len(self.members) >= self._max_workers:
            raise TableFullError(f"all {self._max_workers} worker slots are taken (limits.workers)")
        member = Member(
            self._next_id, spec, named, self._context, self._fits, self._served_by_others
        )
        self._next_id += 1
        self.members[member.worker_id] = member
        self._start(member, member.run())
        log.info("worker %d (%s) added, by %s", member.worker_id, spec.name, by)
        return member

    def _served_by_others(self, worker_id: int, models: Iterable[str]) -> bool:
        """Return whether workers other than `worker_id`, which are ready and answer probes, serve
        all of `models`.
        """
        others = (m for m in self.members.values() if m.worker_id != worker_id and m.ready)
        others = (m for m in others if m.state != "silent")
        served = {name for m in others if m.recognized for name in m.recognized.facts.models}
        return served.issuperset(models)

    def _check_seat(self, spec: WorkerSpec) -> None:
        """Raise DuplicateWorkerError if another worker has the same place at a bound endpoint."""
        for member in self.members.values():
            if spec.seat is not None and member.spec.seat == spec.seat and not member.leaving:
                raise DuplicateWorkerError(f"worker {member.worker_id} {taken(spec)}")

    def at_url(self, url: str) -> list[Member]:
        """Return all workers at this URL, which are ranks of one engine."""
        return [member for member in self.members.values() if member.spec.url == url]

    @property
    def refused_ranks(self) -> int:
        """The number of engines' ranks for which a limit allows no worker."""
        named = {id(m.named): m.named for m in self.members.values()}
        return sum(one.refused_ranks for one in named.values())

    @property
    def refused_models(self) -> int:
        """The number of models that workers list but that a limit does not allow to be served."""
        known = (member.recognized for member in self.members.values())
        return sum(one.refused_models for one in known if one is not None)

    def leave(self, member: Member, by: str) -> None:
        """Drain a worker at an operator's request, and remove it once it is idle (`sweep`); `by`
        names in log lines who asked for it.

        The rank does not return by itself, even if its engine restarts.
        """
        self._dismiss(member)
        self.drop(member, by)

    def drop(self, member: Member, by: str, may_return: bool = False) -> None:
        """Drain a worker and remove it once it is idle, without noting it as removed by an
        operator. If `may_return`, it returns when it is listed again.
        """
        leave, turning = member.leave, member.turning
        if leave is None:
            drained = member.draining if turning is None else turning.drained
            member.leave = Leaving(self.now_s, may_return, drained)
        elif not may_return:
            member.leave = replace(leave, may_return=False)
        member.drain(f"{by}, to be removed when idle")

    def take_back(self, member: Member, by: str, undrain: bool = False) -> None:
        """Keep a worker that was leaving, because it is listed again; it gets requests as before.

        With `undrain`, it gets requests even if it was already drained when it began to leave.
        """
        leave, member.leave = member.leave, None
        if leave is None:
            return
        if undrain or not (leave.drained or member.turning is not None):
            member.undrain(f"{by}, which names it again")
        elif member.turning is not None:
            member.turning.drained = leave.drained

    def _dismiss(self, member: Member) -> None:
        """Note that an operator removed a worker: its rank does not return by itself, and after its
        last rank neither does its engine.
        """
        named = member.named
        if named.spec.rank is None and member.spec.rank is not None:
            named.without.add(member.spec.rank)
        others = (m for m in self.members.values() if m.named is named and m is not member)
        if all(m.leaving for m in others):
            self.dismissed.add(key_of(named.spec))

    def _fits(self, member: Member, ranks: tuple[int, ...]) -> bool:
        """Return whether `member` still belongs to its engine, which now has these `ranks`.

        A member is added for each rank that has none. A member whose rank no longer exists takes a
        rank without a member, or leaves if there is none.
        """
        named = member.named
        if named.spec.rank is not None or member.leaving:
            return True
        most = self._context.terms.ranks
        wanted: tuple[int | None, ...] = ranks[:most] if len(ranks) > 1 else (None,)
        has = {m.spec.rank for m in self.members.values() if m.named is named and not m.leaving}
        missing = [rank for rank in wanted if rank not in has and rank not in named.without]
        fits = member.spec.rank in wanted
        try:
            if not fits and missing:
                member.spec = member.as_turned(spec_of(named, missing.pop(0)))
            elif not fits:
                self.drop(member, _RANKS)
            for rank in missing:
                self._add_rank(named, rank)
        except (TableFullError, DuplicateWorkerError, WorkerSpecError) as error:
            trouble = str(error)
        else:
            beyond = len(ranks) > most
            trouble = f"at most {most} of one URL become workers (limits.ranks)" if beyond else ""
        if trouble not in ("", named.trouble):  # each of its ranks will find the same
            log.warning("%s: not all of its %d ranks: %s", named.spec.url, len(ranks), trouble)
        named.trouble = trouble
        has = {m.spec.rank for m in self.members.values() if m.named is named and not m.leaving}
        named.refused_ranks = max(len(ranks) - len(has | named.without), 0) if trouble else 0
        return fits

    def _add_rank(self, named: NamedWorker, rank: int | None) -> None:
        """Follow a new rank of an engine. If a worker for this rank is still leaving, keep that
        worker instead.

        Raises DuplicateWorkerError, TableFullError or WorkerSpecError.
        """
        for member in self.at_url(named.spec.url):
            if member.named is named and member.spec.rank == rank and not member.parting:
                self.take_back(member, _RANKS)
                return
        self._add(spec_of(named, rank), named, _RANKS)

    async def remove(self, member: Member, how: str) -> None:
        """Remove a worker at once. Its running requests are cut off, and retried at other workers
        where possible.

        `how` is the reason for the log. If the caller is cancelled, the removal still continues.
        """
        if member.worker_id in self._tasks:
            self._dismiss(member)
        await self._remove(member, how)

    async def _remove(self, member: Member, how: str) -> None:
        if member.worker_id in self._tasks:
            log.info("worker %d (%s) removed, %s", member.worker_id, member.spec.name, how)
        await self._part_from(member)

    async def _part_from(self, member: Member) -> None:
        task = self._tasks.pop(member.worker_id, None)
        if task is None:
            return
        del self.members[member.worker_id]
        self.denials.discard(member.worker_id)
        task.cancel()  # the task must not report to the core any more
        if (asking := self._probing.pop(member.worker_id, None)) is not None:
            asking.cancel()
        self._context.report_fact(WorkerChange(self._context.clock(), member.worker_id, "gone"))
        closing = asyncio.create_task(_close(member, task))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    def probe(self, worker_id: int, within_s: float | None) -> None:
        """Probe a worker's health and report the result to the core (`Probed`). At most one probe
        of a worker runs at a time.
        """
        member = self.members.get(worker_id)
        if member is None or worker_id in self._probing:
            return
        asking = asyncio.create_task(member.answer_probe(within_s), name=f"probe {worker_id}")
        self._probing[worker_id] = asking
        asking.add_done_callback(lambda task: self._on_probe_ended(worker_id, task))

    def _on_probe_ended(self, worker_id: int, task: asyncio.Task[None]) -> None:
        if self._probing.get(worker_id) is task:
            del self._probing[worker_id]
        _log_task_error(task)

    def given_up(self, worker_id: int) -> None:
        """Note that the core counts a worker without answers as down, and send its unanswered
        requests to other workers.
        """
        if (member := self.members.get(worker_id)) is not None:
            member.log_down()
            member.abandon_silent()

    def stalled(self, worker_id: int) -> None:
        """Send the requests of a stalled worker to other workers, except those whose clients have
        received a part of the answer.
        """
        if (member := self.members.get(worker_id)) is not None:
            member.abandon_silent()

    def lacks(self, worker_id: int, path: str | None) -> None:
        """Note that a worker answered that it has no such path.

        The worker, and all others at its URL, get no request for this path until they are
        recognized again.
        """
        asked = self.members.get(worker_id)
        if asked is None or path is None:
            return
        for member in self.at_url(asked.spec.url):
            known = member.recognized
            if known is not None and path not in known.facts.lacks:
                log.info("worker %d (%s) has no %s", member.worker_id, member.spec.name, path)
                facts = replace(known.facts, lacks=known.facts.lacks | {path})
                member.amend(replace(known, facts=facts))

    def denied(self, worker_id: int, model: str) -> None:
        """Note that a worker answered that it does not have `model`: requests prefer other workers,
        and the worker's list of models is read again.
        """
        if (asked := self.members.get(worker_id)) is not None:
            for member in self.at_url(asked.spec.url):
                member.deny(model)
                self.denials.add(member.worker_id)

    def has_model(self, worker_id: int, model: str) -> None:
        """Note that a worker answered a request for `model`, so that an earlier answer that it
        lacks the model no longer counts.
        """
        if worker_id in self.denials and (member := self.members.get(worker_id)) is not None:
            member.note_model_served(model)
            if not member.denials:
                self.denials.discard(worker_id)

    def sweep(self, requests_of: Callable[[int], int]) -> None:
        """Remove leaving workers that are idle or have used up `drain_s`; complete changes of roles
        by the same rule. It is called at every tick.
        """
        drain_s = self._context.terms.drain_s
        until_s = self.now_s - drain_s if drain_s else -math.inf
        for member in list(self.members.values()):
            if member.leave is None:
                if (turning := member.turning) is not None:
                    self._turn_idle(member, turning, requests_of, turning.since_s <= until_s)
                continue
            if requests_of(member.worker_id) == 0:
                self._start_removal(member, "idle")
            elif member.leave.since_s <= until_s:
                self._start_removal(member, f"cut short: it drained for {drain_s:g} s (drain_s)")

    def change_role(self, members: Sequence[Member], role: Role, by: str) -> None:
        """Drain workers, and give all or none of them another role once they are idle (`sweep`).

        If no other worker can serve in the meantime and the engine need not be told of its role,
        the role changes at once. Raises RoleRefusedError if the change is not possible.
        """
        now = [m for m in members if m.turning is None and m.role == role]
        members = [m for m in members if m not in now]
        for member in members:
            self._check_role(member, role, members)
        for member in members:
            before = member.turning
            drained = member.draining if before is None else before.drained
            if before is not None and member.role == role:  # it has not begun
                self._turned(member, None, by)
            elif self._left_without(members) and not member.draining:
                self._turned(member, role, by)
            else:
                if not member.draining:
                    member.drain(f"{by}, to take the role {role} when idle")
                member.turning = Turning(role, self.now_s, drained)

    def _check_role(self, member: Member, role: Role, members: Sequence[Member]) -> None:
        known, name = member.recognized, f"worker {member.worker_id} ({member.spec.name})"
        if known is None or member.leaving:
            raise RoleRefusedError(f"{name} is {'leaving' if known else 'not recognized yet'}")
        if member.turning is not None and member.turning.switching:
            raise RoleRefusedError(f"{name} takes the role {member.turning.role} just now")
        if role != "both" and member.spec.group is None and known.own_group is None:
            raise RoleRefusedError(f"{name} shares KV with no other worker: it has no group")
        missing = self._left_without(members)
        if adapter_of(known.kind).role_switch is not None:
            if role == "both":
                raise RoleRefusedError(f"{name}: its engine can be prefill or decode only")
            ranks = [m for m in self.at_url(member.spec.url) if m not in members and not m.leaving]
            if ranks:
                raise RoleRefusedError(f"{name} shares its engine: name its URL, for all ranks")
            if missing:
                raise RoleRefusedError(f"{missing} while {name} drains")
        elif missing:
            facts = [with_role(m.recognized, replace(m.spec, role=role)).facts for m in members
                     if m.recognized]  # fmt: skip
            if missing := self._left_without(members, facts):
                raise RoleRefusedError(f"{missing} if {name} has the role {role}")

    def _left_without(self, members: Sequence[Member], facts: Sequence[WorkerFacts] = ()) -> str:
        """Return a text with the model that no other worker could serve without `members`; "" if
        there is none.

        `facts` describe further workers that count as other workers.
        """
        models = {name for m in members if m.recognized for name in m.recognized.facts.models}
        others = [m for m in self.members.values() if m.ready and m not in members]
        all_facts = [*(m.recognized.facts for m in others if m.recognized), *facts]
        for model in sorted(models):
            serving = [one for one in all_facts if model in one.models]
            if not serves(serving):
                why = next(iter(halves_missing(serving)), None)
                what = "worker" if why is None else f"worker that {why.missing}"
                return f"the model {model!r} would have no {what}"
        return ""

    def _turn_idle(
        self, member: Member, turning: Turning, requests_of: Callable[[int], int], late: bool
    ) -> None:
        """Complete a change of role once the worker's requests have ended; `late` True means that
        `drain_s` is over.

        All ranks of an engine change together if the engine must be told of the role.
        """
        path = adapter_of(member.kind).role_switch
        if path is None:  # what still runs there may: nothing is taken from it
            if late or not requests_of(member.worker_id):
                self._turned(member, turning.role, "drain_s is over" if late else "idle")
            return
        ranks = [m for m in self.at_url(member.spec.url) if m.turning is not None]
        if member is not ranks[0] or turning.switching:
            return
        requests = sum(requests_of(m.worker_id) for m in ranks)
        if requests and late:
            line = "worker %d (%s) keeps its role: %d requests run"
            log.error(line, member.worker_id, member.spec.name, requests)
            for rank in ranks:
                self._turned(rank, None, "drain_s is over")
        elif not requests:
            turning.switching = True
            task = asyncio.create_task(self._switch(ranks, turning, path, late))
            self._switching.add(task)
            task.add_done_callback(self._switching.discard)
            task.add_done_callback(_log_task_error)

    async def _switch(
        self, ranks: Sequence[Member], turning: Turning, path: str, late: bool
    ) -> None:
        refusal = await ranks[0].switch_engine(path, turning.role)
        if refusal:
            line = "worker %d (%s) keeps its role: %s"
            log.warning(line, ranks[0].worker_id, ranks[0].spec.name, refusal)
            if not late:  # other routers' requests may run there still
                await asyncio.sleep(self._context.terms.health_s)
                turning.switching = False
                return
        for rank in ranks:
            if rank.turning is not None and not rank.parting:
                if not refusal:
                    await rank.turned_engine(turning.role, "its engine, which switched")
                    self.turned += 1
                self._turned(rank, None, "drain_s is over" if refusal else "its engine switched")

    def _turned(self, member: Member, role: Role | None, by: str) -> None:
        """End a change of role: the worker takes `role`, or keeps its own if `role` is None. It
        gets requests as before the change.
        """
        turning, member.turning = member.turning, None
        if role is not None:
            self.turned += 1
            member.turn(role, by)
        else:
            self.kept_roles += turning is not None and member.role != turning.role
        if member.draining and turning is not None and not turning.drained and not member.leaving:
            member.undrain(by)

    def _start_removal(self, member: Member, how: str) -> None:
        if member.parting:
            return
        member.parting = True
        self.cut_short += how != "idle"
        removal = asyncio.create_task(self._remove(member, how))
        self._closing.add(removal)
        removal.add_done_callback(self._closing.discard)

    def allow_removed_workers(self) -> None:
        """Let workers that an operator removed return, because an operator changed the
        configuration since.
        """
        self.dismissed.clear()

    async def aclose(self) -> None:
        """Stop following all workers."""
        for task in self._switching:
            task.cancel()
        while self.members:  # a rank may still join meanwhile
            await self._part_from(next(iter(self.members.values())))
        if self._closing:
            await asyncio.wait(set(self._closing))


async def _close(member: Member, task: asyncio.Task[None]) -> None:
    """Wait until the member's task has ended, and close its connections."""
    await asyncio.wait([task])
    await member.close()


def _log_task_error(task: asyncio.Task[None]) -> None:
    """Log the error with which a member's task ended. The task should end only by being cancelled;
    any error is a defect of the router.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s died", task.get_name(), exc_info=error)


_RELOAD = "configuration reload"


def reconcile(fleet: FleetManager, wanted: Iterable[WantedWorker]) -> list[str]:
    """Bring the fleet in line with the workers in `wanted`: add new workers, and drain those no
    longer listed, except workers that an operator added. Return a line for each thing that could
    not be done.

    Other thresholds or another weight change a worker in place. A leaving worker that is listed
    again is kept. A worker that an operator removed stays out for as long as it is listed without a
    break.
    """
    missing = {one.key: one for one in wanted}
    fleet.dismissed &= missing.keys()
    for key in fleet.dismissed:
        del missing[key]
    groups: dict[int, tuple[NamedWorker, list[Member]]] = {}
    for member in fleet.members.values():
        groups.setdefault(id(member.named), (member.named, []))[1].append(member)
    for named, members in groups.values():
        if staying := [m for m in members if not m.leaving]:
            _keep_or_drop(fleet, named, staying, missing)
    for named, members in groups.values():
        one = missing.get(key_of(named.spec))
        back = [m for m in members if m.leave is not None and m.leave.may_return and not m.parting]
        if one is not None and back and same_but_thresholds(one.spec, named.spec):
            del missing[one.key]
            for member in back:
                fleet.take_back(member, one.by)
            _rename(named, one, back)
    refused = []
    for one in missing.values():
        try:
            fleet.add(one.spec, _source_name(one.by))
        except (TableFullError, DuplicateWorkerError, WorkerSpecError) as error:
            refused.append(f"worker {one.spec.name}: {error}")
    return refused


def _keep_or_drop(
    fleet: FleetManager, named: NamedWorker, staying: list[Member], missing: dict[Key, WantedWorker]
) -> None:
    one = missing.get(key_of(named.spec))
    if one is not None and same_but_thresholds(one.spec, named.spec):
        del missing[one.key]
        _rename(named, one, staying)
    elif named.by_hand:
        missing.pop(key_of(named.spec), None)
    else:
        for member in staying:
            fleet.drop(member, _source_name(named.by), may_return=True)


def _rename(named: NamedWorker, one: WantedWorker, members: Iterable[Member]) -> None:
    """Replace the options under which a worker was listed by those in `one`."""
    if not named.by_hand:
        named.by = one.by
    if one.spec != named.spec:
        named.spec = one.spec
        for member in members:
            member.respec(spec_of(named, member.spec.rank))


def _source_name(by: str) -> str:
    """Return the name, in log lines of a running router, of who listed a worker."""
    return _RELOAD if by == CONFIGURATION else by


_FOLLOW_S = 1.0  # between two looks at the work of roles


class RoleKeeper:
    """Changes the roles of prefill and decode workers as the mix of requests demands. Lifetime:
    process.
    """

    def __init__(self, fleet: FleetManager, core: RouterCore, terms: RoleSettings) -> None:
        self.groups: dict[str, tuple[RoleController, WorkMeter]] = {}
        self._fleet = fleet
        self._core = core
        self._terms = terms
        self._looked_s = -math.inf
        self._kept_roles = 0  # of the fleet, as last seen

    def look(self) -> None:
        """Change a worker's role if the present mix of requests makes that worthwhile. It is called
        at every tick and does nothing more than once a second.
        """
        now_s = self._fleet.now_s
        if now_s - self._looked_s < _FOLLOW_S:
            return
        self._looked_s = now_s
        members: dict[str, list[Member]] = {}
        for member in self._fleet.members.values():
            if member.recognized is not None and member.recognized.facts.group is not None:
                members.setdefault(member.recognized.facts.group, []).append(member)
        for group in self.groups.keys() - members.keys():
            del self.groups[group]
        for group, of_it in members.items():
            self._follow(group, of_it, now_s)

    def _follow(self, group: str, members: list[Member], now_s: float) -> None:
        controller, meter = self.groups.setdefault(
            group, (RoleController(self._terms), WorkMeter())
        )
        workers = self._core.workers
        halves: dict[Role, list[Worker]] = {"prefill": [], "decode": []}
        for member in members:
            worker = workers.get(member.worker_id)
            if worker is not None and worker.state == "ready" and worker.facts.role in halves:
                halves[worker.facts.role].append(worker)
        prefill, decode = halves["prefill"], halves["decode"]
        work = meter.read(now_s, self._core.columns, prefill, decode)
        controller.observe(now_s, *work)
        if any(m.turning is not None for m in members):  # one after the other
            return
        if self._kept_roles != self._fleet.kept_roles:
            self._kept_roles = self._fleet.kept_roles
            controller.refused(now_s)
        change = controller.decide(now_s, len(prefill), len(decode))
        if change is None:
            return
        losing = decode if change.role == "prefill" else prefill
        requests = self._core.columns.requests
        least = min(losing, key=lambda w: (int(requests[w.slot]), w.worker_id))
        member = self._fleet.members[least.worker_id]
        log.info("roles of %r: %s", group, change)
        whole = (
            self._fleet.at_url(member.spec.url) if adapter_of(member.kind).role_switch else [member]
        )
        try:
            self._fleet.change_role(whole, change.role, "the mix of requests")
        except RoleRefusedError as error:
            log.warning("roles of %r are unchanged: %s", group, error)
            controller.refused(now_s)

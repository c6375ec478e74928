"""Passes the workers on in a hot restart: the old router lists its workers, and the new router adds
them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from router.core.placement.worker_caches import TableFullError
from router.engines.spec import WorkerSpecError
from router.engines.worker_spec import parse_worker_spec
from router.fleet.manager import DuplicateWorkerError
from router.restart.hot_restart import HandoverWorker, RestartHandover

if TYPE_CHECKING:
    from router.assembly import Router

log = logging.getLogger(__name__)

_BY = "the router before this one"
_WARM_S = 10.0  # for workers to be known; the router before serves meanwhile
_LOOK_S = 0.02


def added_by_hand(router: Router) -> tuple[str, ...]:
    """Return the workers that an operator added and that stay until an operator removes them."""
    named = (m.named for m in router.fleet.members.values() if not m.leaving)
    return tuple(sorted({str(one.spec) for one in named if one.by_hand}))


def workers_of(router: Router) -> tuple[HandoverWorker, ...]:
    """Return all workers of this router that are not being removed, with the state that the next
    router needs.
    """
    core = router.dispatcher.core
    found = []
    for member in router.fleet.members.values():
        if not member.leaving:
            worker = core.workers.get(member.worker_id)
            known = worker is not None and member.feed is not None and worker.kv.known
            name = member.spec.name
            turning = member.turning  # a change of role that has not ended is forgotten
            draining = member.draining and (turning is None or turning.drained)
            found.append(HandoverWorker(name, draining, member.ready, known, member.turned))
    return tuple(found)


async def resume(router: Router, handover: RestartHandover) -> None:
    """Add the workers of the old router, and wait until this router knows as much about them as the
    old router did. A worker that is down is waited for at most `_WARM_S` seconds.
    """
    for text in handover.added:
        try:
            router.fleet.add(parse_worker_spec(text), _BY, by_hand=True)
        except (WorkerSpecError, DuplicateWorkerError, TableFullError) as error:
            log.warning("worker %s of %s: %s", text, _BY, error)
    clock = asyncio.get_running_loop().time
    until_s = clock() + _WARM_S
    while True:
        missing = _missing(router, handover)
        if not missing or clock() > until_s:
            break
        await asyncio.sleep(_LOOK_S)
    if missing:
        log.warning("not known as well as before: %s", ", ".join(sorted(missing)[:20]))


def _missing(router: Router, handover: RestartHandover) -> set[str]:
    """Return the workers about which the old router knew more than this router does. Also drain the
    workers that the old router drained, and set the roles that it had changed.
    """
    now = {worker.name: worker for worker in workers_of(router)}
    followed = {member.spec.url for member in router.fleet.members.values()}
    missing = set()
    for before in handover.workers:
        worker = now.get(before.name)
        if worker is not None and before.turned is not None and worker.turned is None:
            for member in router.fleet.members.values():
                if member.spec.name == before.name:
                    member.turn(before.turned, _BY)
        if worker is not None and before.draining and not worker.draining:
            for member in router.fleet.members.values():
                if member.spec.name == before.name:
                    member.drain(_BY)
        if worker is None:  # its engine's ranks are not known yet, or it is no longer wanted
            if before.name.partition("#")[0] in followed:
                missing.add(before.name)
        elif (before.ready and not worker.ready) or (before.known and not worker.known):
            missing.add(before.name)
    return missing

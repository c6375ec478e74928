"""Reserves a worker for the request that has waited longest, if many other requests were sent
before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from policies.contract import Ints, Standing
from router.core.placement.eligible import Rows
from router.core.placement.hold_queue import PASSED_S
from router.core.placement.pending import Pending
from router.core.workers.columns import WorkerColumns

PASSES = 8  # of one request; with fewer, room may just have been elsewhere

_Line = dict[int, "_Wait"]  # by serial, in the order in which they began to wait


@dataclass(slots=True)
class _Wait:
    """A waiting request, with the number of later requests that were sent before it, and the worker
    reserved for it. Lifetime: as long as the request waits.
    """

    pending: Pending
    passed: int = 0  # requests sent since that were not ahead of it, while it was first
    untaken: set[int] = field(default_factory=set)  # workers that it did not take though idle
    worker_id: int | None = None  # reserved for it


class Reservations:
    """Reserves workers for requests that have waited long, at most one worker of each model.

    Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns) -> None:
        self.begun = 0  # times that a worker was reserved
        self._columns = columns
        self._lines: dict[tuple[str, int], _Line] = {}  # by model and priority
        self.models: dict[str, _Wait] = {}  # requests that a worker is reserved for
        self._without: tuple[Rows, int, Rows | None] | None = None  # the latest answer of `rows`

    # Called by the hold queue.

    def waits(self, pending: Pending) -> None:
        """Record that a request begins to wait."""
        key = pending.arrival.model, pending.arrival.priority
        self._lines.setdefault(key, {})[pending.serial] = _Wait(pending)

    def waits_no_more(self, pending: Pending) -> None:
        """Record that a request waits no more: it was sent or rejected, or its client left."""
        model = pending.arrival.model
        key = model, pending.arrival.priority
        line = self._lines[key]
        wait = line.pop(pending.serial)
        if not line:
            del self._lines[key]
        if self.models.get(model) is wait:
            del self.models[model]

    def sent(self, pending: Pending) -> None:
        """Record that a request is sent, whether it waited or not."""
        model = pending.arrival.model
        for (name, _), line in self._lines.items():
            first = next(iter(line.values()))
            if (
                name == model
                and first.pending is not pending
                and not _ahead(pending, pending.standing, first)
            ):
                first.passed += 1

    # Called by the chooser.

    def rows(self, pending: Pending, standing: Standing, rows: Rows) -> Rows | None:
        """Return `rows` without the worker reserved for another request, or None if none is left.

        The reserved worker stays in the result if this request is ahead of the other one in the
        hold queue. `standing` says if this request's session is new, or has a cold or warm cache.
        """
        wait = self.models.get(pending.arrival.model)
        if wait is None or wait.pending is pending or _ahead(pending, standing, wait):
            return rows
        worker_id = wait.worker_id
        if worker_id is None or worker_id not in rows.worker_ids:
            return rows
        known = self._without
        if known is None or known[0] is not rows or known[1] != worker_id:
            rest = [worker for worker in rows.workers if worker.worker_id != worker_id]
            known = self._without = rows, worker_id, Rows.of(rest) if rest else None
        return known[2]

    def refused(self, pending: Pending, rows: Rows, hits: Ints, now_s: float) -> None:
        """Record that no worker of `rows` takes a held request.

        If many other requests have been sent before it, reserve a worker for it. `hits` are the
        request's hit tokens on each row.
        """
        model, priority = pending.arrival.model, pending.arrival.priority
        if not pending.held or now_s - pending.arrival.now_s <= PASSED_S:
            return
        first = next(iter(self._lines[model, priority].values()))
        if first.pending is not pending or first.passed < PASSES:
            return
        holder = self.models.get(model)
        if (
            holder is not None
            and holder is not first
            and holder.pending.arrival.priority <= priority
        ):
            return
        self._give_up_untaken(first, rows)
        if first.worker_id in rows.worker_ids:
            return
        first.worker_id = self._best(first, rows, hits)
        if first.worker_id is None:
            if holder is first:
                del self.models[model]
        else:
            self.models[model] = first
            self.begun += 1

    def _give_up_untaken(self, wait: _Wait, rows: Rows) -> None:
        """Give up the reserved worker if it is idle and the waiting request still did not get it.

        Also give it up if it is not in `rows`.
        """
        if wait.worker_id not in rows.worker_ids:
            wait.worker_id = None
            return
        slot = rows.slot_ids[rows.worker_ids.index(wait.worker_id)]
        columns = self._columns
        others = columns.foreign_running[slot] + columns.foreign_waiting[slot]
        if not columns.requests[slot] and not others:
            wait.untaken.add(wait.worker_id)
            wait.worker_id = None

    def _best(self, wait: _Wait, rows: Rows, hits: Ints) -> int | None:
        """Return the id of the best worker to reserve for a waiting request, or None if there is
        none. The best worker has the most KV memory. Among workers with equal KV memory, it is the
        one with most of the prompt cached, and then the one with the fewest requests. Workers that
        were idle but did not get this request are left out.
        """
        columns, slots = self._columns, rows.slot_ids
        large = np.nan_to_num(columns.kv_capacity_tokens[slots], nan=0.0)
        order = np.lexsort((columns.requests[slots], -hits, -large))  # stable: then by worker id
        ids = (rows.worker_ids[place] for place in order.tolist())
        return next((worker_id for worker_id in ids if worker_id not in wait.untaken), None)


def _ahead(pending: Pending, standing: Standing, wait: _Wait) -> bool:
    """Return True if `pending` is ahead of the request of `wait` in the hold queue.

    The higher priority decides; with equal priority, a known session is ahead of a new one. The
    times that the two requests have waited do not count.
    """
    priority, other = pending.arrival.priority, wait.pending
    if priority != other.arrival.priority:
        return priority < other.arrival.priority
    return standing != "new" and other.turn[0]

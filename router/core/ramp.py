"""A worker that joins a pool which runs gets its share of new work little by little.

Its cache is empty and its engine cold, and to most rules an empty worker is the best of all: a
burst would go there whole. So for `ramp_s` only a share of the requests may choose it, which grows
linearly from nothing to all. Which these are follows from their numbers, spread evenly (the
additive recurrence of the golden ratio), so replays agree and no chance is used up.

It is never the reason that somebody waits: who finds no other worker may choose it, and so may a
request of which it holds more than all that do not ramp, since that is no new work.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.contract import Ints
from router.core.eligible import Rows
from router.core.workers import Worker

_GOLDEN = 0.6180339887498949  # of two requests in a row, the places are as far apart as can be
_BETWEEN = 0.7548776662466927  # of two workers: they are not left out by the same requests
_KNOWN_MAX = 64


class Ramps:
    """Lifetime: process."""

    def __init__(self, ramp_s: float) -> None:
        self._ramp_s = ramp_s
        self._since: dict[int, float] = {}  # by worker: when it joined
        self._rows: Rows | None = None  # whose selections are known
        self._known: dict[tuple[int, ...], Rows] = {}  # by those left out

    def __len__(self) -> int:
        """How many ramp, but for those whose end was not noticed yet."""
        return len(self._since)

    def joined(self, worker: Worker, others: Iterable[Worker], now_s: float) -> None:
        """It ramps where its pool has had a worker that serves for as long as a ramp takes."""
        models = set(worker.facts.models)
        settled_s = now_s - self._ramp_s
        if self._ramp_s > 0.0 and any(
            one.is_in and one.joined_s <= settled_s and models.intersection(one.facts.models)
            for one in others
        ):
            self._since[worker.worker_id] = now_s

    def left(self, worker_id: int) -> None:
        """It is gone."""
        self._since.pop(worker_id, None)

    def share(self, worker_id: int, now_s: float) -> float:
        """Of new work that may go there, 0..1; 1 for one that does not ramp."""
        since_s = self._since.get(worker_id)
        return 1.0 if since_s is None else min(max((now_s - since_s) / self._ramp_s, 0.0), 1.0)

    def rows(self, serial: int, rows: Rows, hits: Ints, now_s: float) -> Rows:
        """`rows` without those whose share this request is not of; `hits`: int64[rows], its own.

        `rows` itself where nobody is left out, or nobody would be left.
        """
        ramping = [(row, w) for row, w in enumerate(rows.worker_ids) if w in self._since]
        if not ramping or len(ramping) == len(rows):
            return rows
        out: list[int] = []
        inside = {row for row, _ in ramping}
        best = max(int(hits[row]) for row in range(len(rows)) if row not in inside)
        for row, worker_id in ramping:
            share = self.share(worker_id, now_s)
            if share >= 1.0:
                del self._since[worker_id]
            elif (serial * _GOLDEN + worker_id * _BETWEEN) % 1.0 >= share and hits[row] <= best:
                out.append(row)
        return self._without(rows, tuple(out)) if out else rows

    def _without(self, rows: Rows, out: tuple[int, ...]) -> Rows:
        if self._rows is not rows or len(self._known) >= _KNOWN_MAX:
            self._rows = rows
            self._known.clear()
        known = self._known.get(out)
        if known is None:
            left = [worker for row, worker in enumerate(rows.workers) if row not in out]
            known = self._known[out] = Rows.of(left)
        return known

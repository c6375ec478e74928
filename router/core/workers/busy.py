"""Spares workers that report that they are busy: for a while, other workers are preferred for
requests. A worker reports this by status 429 or 529, or by 503 with a time to wait. Such a refusal
is not a failure, so it does not eject the worker. But a worker that refuses requests at once looks
idle. Without this pause it would attract the requests that other workers could compute.
"""

from __future__ import annotations

from math import inf

from router.core.contract.actions import Action, Busied, Relieved
from router.core.contract.settings import CoreSettings
from router.core.workers.table import Worker, WorkerTable

_DOUBLED_MAX = 16  # times: the longest spell is reached long before


class BusyWorkers:
    """Decides how long each busy worker is spared while other workers are preferred for requests.
    Such a time, a busy spell, lasts as long as the worker asked for. If the worker refuses again
    before it has answered a request, the next spell is twice as long. `busy_max_s` limits each
    spell; 0 switches spells off. Lifetime: process.
    """

    def __init__(self, settings: CoreSettings, workers: WorkerTable) -> None:
        self._settings = settings
        self._workers = workers
        self._since_s: dict[int, float] = {}  # by worker that was busy lately: the beginning
        self.next_s = inf  # when the next spell is over

    def on_busy_refusal(
        self, worker: Worker, sent_s: float, retry_after_s: float, now_s: float
    ) -> list[Action]:
        """Record that a worker refused a request because it is busy, and spare the worker for a
        while. `sent_s` is the time at which the request was sent to the worker. `retry_after_s` is
        the number of seconds that the worker asked for, or 0 if it named no time.
        """
        spell, most_s = worker.spell, self._settings.busy_max_s
        if most_s <= 0.0:
            return []
        if now_s < spell.until_s:  # another refusal of the same spell, or all workers are busy
            spell.until_s = max(spell.until_s, now_s + min(retry_after_s, most_s))
            return []
        if sent_s >= spell.until_s:  # it was asked again, and still is
            spell.times += 1
        spell.times = max(spell.times, 1)
        doubled = 2.0 ** min(spell.times - 1, _DOUBLED_MAX)
        busy_s = min((retry_after_s or self._settings.busy_s) * doubled, most_s)
        spell.retry_s, spell.until_s = spell.until_s, now_s + busy_s
        spell.on = True
        self.next_s = min(self.next_s, spell.until_s)
        self._workers.changed()
        if worker.worker_id in self._since_s:
            return []
        self._since_s[worker.worker_id] = now_s
        return [Busied(worker.worker_id, busy_s)]

    def request_answered(self, worker: Worker, sent_s: float) -> None:
        """Record that a worker answered a request that was sent at `sent_s`.

        If the request was sent after the last time in which the worker was spared as busy, the next
        such time starts with the shortest length again. A time that has begun does not change.
        """
        if sent_s >= worker.spell.retry_s:
            worker.spell.times = 0

    def expire(self, now_s: float) -> None:
        """Clear the busy mark of each worker whose time of being spared is over."""
        self.next_s = inf
        for worker_id in self._since_s:
            worker = self._workers.get(worker_id)
            if worker is None or not worker.spell.on:
                continue
            if now_s >= worker.spell.until_s:
                worker.spell.on = False
                self._workers.changed()
            else:
                self.next_s = min(self.next_s, worker.spell.until_s)

    def tick(self, now_s: float) -> list[Action]:
        """Clear the busy mark of each worker whose time of being spared is over.

        Return an action for each worker that has not been busy for `busy_max_s` seconds, so that
        the operator learns that the worker has recovered.
        """
        if not self._since_s:
            return []
        self.expire(now_s)
        actions: list[Action] = []
        for worker_id, since_s in list(self._since_s.items()):
            worker = self._workers.get(worker_id)
            until_s = -inf if worker is None else worker.spell.until_s
            if now_s < until_s + self._settings.busy_max_s:
                continue
            del self._since_s[worker_id]
            if worker is not None and until_s > since_s:
                worker.spell.times = 0
                actions.append(Relieved(worker_id, until_s - since_s))
        return actions
